"""Engines as runners of plans, and what their ranks hold of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from offplan.checkpoint.model import Model
from offplan.engines.engine import Engine, Said, Version, page_locked_bytes
from offplan.engines.names import engine_parameters
from offplan.engines.offloading import export_check, say_offload
from offplan.engines.ranks import Divider
from offplan.engines.registry import find_engine
from offplan.engines.served import require_served
from offplan.held.held import Held, hold_whole
from offplan.held.layout import Layout
from offplan.held.runner import OWN_RUNTIME, PassRules, Runner
from offplan.held.stage import Stage
from offplan.plan import Goal, Offload, Workload


@dataclass(frozen=True)
class EngineRunner:
    """An engine of one version, which runs plans by its flags or by offplan's worker in it."""

    name: str
    """The name that a goal has for it: ``vllm``, ``vllm==0.31``."""
    engine: Engine
    version: Version

    takes_one_rule = True

    @property
    def pass_rules(self) -> PassRules:
        """How the engine runs a pass."""
        return self.engine.pass_rules

    @property
    def places_embedding(self) -> bool:
        """Whether the input embedding may lie on the host: no flag says that, the worker does."""
        return self.engine.is_worker

    @property
    def max_bytes_unit(self) -> int:
        """A rule's ``max_bytes`` is a whole number of these."""
        return self.engine.max_bytes_unit

    def require_served(self, model: Model, context: int) -> None:
        """Raise ExportError for a model or a context with which the engine does not start."""
        require_served(model, context, self.engine)

    def lay_out(self, stage: Stage) -> Layout:
        """Return how the engine lays out the weights of a stage."""
        gpu_growth = {
            tensor.name: Fraction(after.nbytes, before.nbytes)
            for before, after in self.engine.grow(stage).items()
            for tensor in before.tensors
        }
        host_growth = {
            # scales may stay on the GPU
            tensor.name: Fraction(
                0 if "scale" in each.name else page_locked_bytes(each.nbytes), each.nbytes
            )
            for each in engine_parameters(stage, {})
            for tensor in each.tensors
            if each.nbytes
        }
        if not gpu_growth:
            return Layout(host_growth=host_growth)
        tensors = [t for layer in stage.layers for p in layer.parameters for t in p.stored]
        grown = Layout(gpu_growth).gpu_bytes(tensors) - sum(tensor.nbytes for tensor in tensors)
        kept = self.engine.stay(stage, self.version).more_gpu_bytes - grown
        return Layout(gpu_growth, host_growth, grown, kept)

    def demand(self, offload: Offload, held: Held) -> Said:
        """Return what makes the engine run a decision; raises ExportError if it cannot."""
        return say_offload(offload, held, self.name)

    def checker(self, held: Held) -> Callable[[Offload], Said | None]:
        """Return what demands, or None for a decision that the engine cannot run."""
        return export_check(held, self.name)


def find_runner(engine: str | None) -> Runner:
    """Find the runner that a goal names; raises ExportError for one that there is not."""
    return OWN_RUNTIME if engine is None else EngineRunner(engine, *find_engine(engine))


def lower(model: Model, goal: Goal, workload: Workload) -> Held:
    """Lower a model to what the ranks hold that a goal names.

    Raises ExportError for a model that the engine cannot divide so, or of which that is not known.
    """
    runner = find_runner(goal.engine)
    if goal.engine is None or goal.ranks.num_gpus == 1:
        return Held((hold_whole(model, runner),))
    divider = Divider(model, goal.engine, runner, goal.ranks)
    stages = tuple(divider.stage(number) for number in range(goal.ranks.pipeline))
    return Held(stages).plan_for(workload)
