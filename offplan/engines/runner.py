"""Engines as runners of plans, and the shares of a model that their GPUs hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from offplan.capabilities.table import Recoding
from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import Table
from offplan.engines.engine import (
    BACKENDS,
    Engine,
    EngineDemand,
    Version,
    join_flags,
    note_more_memory,
    note_page_locked,
    page_locked_bytes,
    require_stored_weights,
)
from offplan.engines.names import engine_parameters, lay_out_experts
from offplan.engines.ranks import Divider
from offplan.engines.registry import find_engine
from offplan.engines.taken import StageTaken, choose_packed
from offplan.errors import ExportError
from offplan.held.held import hold_counted, hold_whole, recode_stages
from offplan.held.layout import Layout, PassRules, grow
from offplan.held.runner import Runner
from offplan.held.runtimes import RUNTIMES
from offplan.held.stage import Stage
from offplan.placement import place
from offplan.plan import Goal, Offload, Plan, Rule


@dataclass(frozen=True)
class EngineRunner:
    """An engine of one version, which runs plans by its flags or by offplan's worker in it."""

    name: str
    """The name that a goal has for it: ``vllm``, ``vllm==0.31``."""
    engine: Engine
    version: Version

    takes_one_rule = True
    backends = BACKENDS

    @property
    def pass_rules(self) -> PassRules:
        """How the engine runs a pass."""
        return self.engine.pass_rules

    def places_tables(self, tables: Sequence[Table]) -> bool:
        """Return True if these may lie on the host: no flag says that; the worker moves the input
        embedding."""
        return self.engine.is_worker and all(table.is_input for table in tables)

    @property
    def holds_packed(self) -> bool:
        """True if it holds packed weights: no flag says which, the worker does."""
        return self.engine.is_worker

    def choose_packed(self, stage: Stage, weights: Sequence[Parameter]) -> set[int]:
        """Leave out what vLLM fuses with what cannot be packed, and heads that it builds plain."""
        return choose_packed(stage, weights)

    @property
    def max_bytes_unit(self) -> int:
        """A rule's ``max_bytes`` is a whole number of these."""
        return self.engine.max_bytes_unit

    def require_served(self, model: Model, context: int) -> None:
        """Raise ExportError for a model or a context with which the engine does not start."""
        self.engine.require_served(model, context)

    def lay_out(self, stage: Stage) -> Layout:
        """Return how the engine lays out the weights of a stage."""
        least, _ = self.engine.kernels(stage, self.version)
        parameters = engine_parameters(stage, {})
        padded = lay_out_experts(parameters, least)
        gpu_growth = {
            tensor.name: Fraction(after.nbytes, before.nbytes)
            for before, after in padded.items()
            for tensor in before.tensors
        }
        host_growth = {
            # scales may stay on the GPU
            tensor.name: Fraction(
                0 if "scale" in each.name else page_locked_bytes(each.nbytes), each.nbytes
            )
            for each in parameters
            for tensor in each.tensors
            if each.nbytes
        }
        if not gpu_growth:
            packed = (each.parameters for each in parameters if each.packs is not None)
            of_dense = (fused for fused in packed if not fused[0].is_expert)
            most = max((sum(p.num_weights for p in fused) for fused in of_dense), default=0)
            return Layout(host_growth=host_growth, fused_weights=most)
        tensors = [t for layer in stage.layers for p in layer.parameters for t in p.stored]
        grown = grow(tensors, gpu_growth) - sum(tensor.nbytes for tensor in tensors)
        kept = self.engine.demand_resident(stage, self.version).more_gpu_bytes - grown
        return Layout(gpu_growth, host_growth, grown, kept)

    def demand(self, offload: Offload, stages: Sequence[Stage]) -> EngineDemand:
        """Return what makes the engine run a decision; raises ExportError if it cannot.

        A GPU of each stage is asked once; it holds its weights as the decision says. GPU memory is
        that of the stage that takes most, page-locked memory that of all GPUs.
        """
        demands = [self.demand_of(offload, stage) for stage in stages]
        flags = {name: value for each in demands for name, value in each.flags.items()}
        if not self.engine.is_worker and any(each.flags != flags for each in demands):
            told = "; ".join(" ".join(join_flags(each.flags)) for each in demands)
            raise ExportError(
                f"{stages[0].label}: {self.engine.title} gives all stages of a pipeline the same "
                f"flags, and the plan needs others in each ({told})"
            )
        weights = [stage.loaded_bytes for stage in stages]
        pinned = [each.pinned_bytes for each in demands]
        largest = weights.index(max(weights))
        own, elsewhere = demands[largest], stages[0].num_gpus * sum(pinned) - pinned[largest]
        return replace(
            own,
            flags=flags,
            environment={n: value for each in demands for n, value in each.environment.items()},
            more_gpu_bytes=max(each.more_gpu_bytes for each in demands),
            pinned_elsewhere=elsewhere + own.pinned_elsewhere,
        )

    def demand_of(self, offload: Offload, stage: Stage) -> EngineDemand:
        """Return what makes a GPU of one stage run a decision, whose patterns start anew in it."""
        engine, version = self.engine, self.version
        require_stored_weights(offload, engine)
        if not offload.rules and offload.embeddings == "device" and offload.recoding is None:
            return engine.demand_resident(stage, version)
        if engine.demand_rule is None:
            return StageTaken.find(offload, stage, version).demand
        return engine.demand_rule(
            _only_rule(offload, engine), place(stage, offload), stage, version
        )

    def note_memory(self, plan: Plan, stages: Sequence[Stage]) -> list[str]:
        """Say what memory the engine takes beyond a plan's, a sentence each."""
        demand = self.demand(plan.offload, stages)
        notes = note_more_memory(self.engine, demand.more_gpu_bytes)
        if demand.pinned_bytes > plan.stored_bytes:
            notes.append(note_page_locked(self.engine, demand))
        return notes


def find_runner(engine: str | None, way: Way = OWN) -> Runner:
    """Find the runner that a goal names; raises ExportError for one that there is not."""
    return RUNTIMES[way] if engine is None else EngineRunner(engine, *find_engine(engine))


def lower(model: Model, goal: Goal, recoding: Recoding | None = None) -> tuple[Stage, ...]:
    """Lower a model to what the ranks hold that a goal names: one of each stage of a pipeline.

    Raises ExportError for a model that the engine cannot divide so, or of which that is not known.
    Raises CheckpointError for one of which other passes than offplan's own cannot be counted.
    """
    runner = find_runner(goal.engine, goal.way)
    if isinstance(runner, EngineRunner):
        runner.engine.require_cache(model, goal.kv_cache_dtype)
    if goal.engine is None:
        stages = [hold_counted(model, goal.way)]
    elif goal.num_gpus == 1:
        stages = [hold_whole(model, runner, goal.way)]
    else:
        stages = [
            *map(Divider(model, runner, goal.ranks, goal.way).stage, range(goal.ranks.pipeline))
        ]
    return recode_stages(stages, recoding, runner)


def _only_rule(offload: Offload, engine: Engine) -> Rule:
    rules = offload.rules
    if offload.embeddings == "host":
        raise ExportError(
            f"{engine.title} keeps embeddings on the GPU; the plan has them on the host"
        )
    if len(rules) > 1:
        raise ExportError(f"{engine.title}'s flags say one rule; the plan has {len(rules)}")
    if rules[0].is_mixed:
        raise ExportError(
            f"{engine.title} has one backend for both phases; the plan has "
            f"{rules[0].prefill.name} in prefill and {rules[0].decode.name} in decode"
        )
    return rules[0]
