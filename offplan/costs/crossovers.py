"""Where a plan's bottleneck changes: at which batch, and at which prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offplan.backends import Backend
from offplan.costs.compute import ModelCompute
from offplan.costs.cores import find_use
from offplan.costs.link import use_bytes
from offplan.costs.predict import predict
from offplan.costs.threshold import least_from_powers
from offplan.costs.timeline import to_seconds
from offplan.costs.work import decode_shape
from offplan.held.held import Held
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.plan import Plan, Workload

MOST_BATCH = 4096
"""Larger batches are not looked at."""
MOST_PROMPT = 2**20
"""Longer prompts are not looked at."""
MOST_CHUNKS = 2048
"""Nor are prompts of more chunks: each chunk is priced by itself."""


@dataclass(frozen=True)
class Crossovers:
    """Where the bottleneck changes; None where it does not, or there is none to change.

    Each supposes that the rules stay and memory suffices, and is the first found between powers of
    two.
    """

    compute_bound_batch: int | None
    """The least batch whose decode step computes for at least as long as the link is busy."""
    streaming_batch: int | None
    """The least batch at which streaming all routed experts beats reading in place those hit."""
    hiding_prompt: int | None
    """The least number of prompt tokens whose compute hides the copies of prefill."""
    cores_batch: int | None = None
    """The least batch at which streaming all routed experts beats the host's cores, where a rule
    has them."""


def find_crossovers(held: Held, machine: MachineProfile, plan: Plan) -> Crossovers:
    """Find where a plan's bottleneck changes with the batch and the prompt.

    ``held`` is so by the plan's packing; ``machine`` has the link to the plan's store.
    """
    stage = held.stage

    def computes_enough(phase: Phase, changed: str, value: int) -> bool:
        workload = plan.workload.model_copy(update={changed: value})
        prediction = predict(held, machine, workload, plan.budget, plan.offload)
        figures = prediction.decode if phase is Phase.DECODE else prediction.prefill
        return figures.compute_s >= figures.link_s

    computes = partial(computes_enough, Phase.DECODE, "batch")
    # prompts longer than the plan's are read in chunks of its size
    hides = partial(computes_enough, Phase.PREFILL, "prompt_tokens")
    moves = plan.prediction.decode.link_bytes > 0
    asked = stage, machine, plan.workload
    wins = _streaming_wins(Backend.UVA, *asked)
    engine = stage.runner.pass_rules
    reads = machine.store == "host" and (engine is None or not engine.copies_in_place)
    beats = _streaming_wins(Backend.HOST, *asked)
    longest = min(MOST_PROMPT, MOST_CHUNKS * plan.offload.prefill_chunk)
    streams = any(rule.prefill.streams for rule in plan.offload.rules)
    return Crossovers(
        compute_bound_batch=least_from_powers(computes, MOST_BATCH) if moves else None,
        streaming_batch=least_from_powers(wins, MOST_BATCH) if reads else None,
        cores_batch=least_from_powers(beats, MOST_BATCH) if plan.has_cores else None,
        hiding_prompt=least_from_powers(hides, longest) if streams else None,
    )


def _streaming_wins(
    backend: Backend, stage: Stage, machine: MachineProfile, workload: Workload
) -> Callable[[int], bool]:
    """Tell whether streaming beats a backend that gets at experts at use, were all offloaded.

    It does where max(compute, copies) < compute + the backend's time. On an engine, where copies
    and compute take turns, where copies < the backend's time.
    """
    offloaded = [
        [unit for unit in units if unit.is_expert]
        for layer, units in zip(stage.layers, stage.units, strict=True)
        if layer.expert_bytes
    ]
    copies_s = sum(machine.copy_seconds(sum(u.nbytes for u in each)) for each in offloaded)
    compute = ModelCompute(stage, machine)

    def use_s(batch: int) -> float:
        asked = machine, stage.experts, batch
        if backend.is_by_cores:
            uses = (find_use(units, *asked, None) for units in offloaded)
            return sum(use.seconds(machine, beside=False) for use in uses)
        read = sum(use_bytes(backend, machine, units, *asked[1:]) for units in offloaded)
        return read / backend.rate(machine).value

    def wins(batch: int) -> bool:
        shape = decode_shape(workload.model_copy(update={"batch": batch}))
        resident_s = to_seconds(compute.price(shape).resident_ps)
        in_turns = stage.runner.pass_rules is not None
        streaming_s = resident_s + copies_s if in_turns else max(resident_s, copies_s)
        return streaming_s < resident_s + use_s(batch)

    return wins if offloaded else lambda batch: False
