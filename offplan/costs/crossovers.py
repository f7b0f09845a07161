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
from offplan.held.unit import Unit
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.plan import Plan, Workload

MOST_BATCH = 4096
"""Larger batches are not looked at."""
MOST_PROMPT = 2**20
"""Longer prompts are not looked at."""


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
    wins = _streaming_wins(stage, machine, plan.workload)
    engine = stage.runner.pass_rules
    reads = machine.store == "host" and (engine is None or not engine.copies_in_place)
    by_cores = plan.has_cores
    beats = _streaming_beats_cores(stage, machine, plan.workload)
    streams = any(rule.prefill.streams for rule in plan.offload.rules)
    return Crossovers(
        compute_bound_batch=least_from_powers(computes, MOST_BATCH) if moves else None,
        streaming_batch=least_from_powers(wins, MOST_BATCH) if reads else None,
        cores_batch=least_from_powers(beats, MOST_BATCH) if by_cores else None,
        hiding_prompt=least_from_powers(hides, MOST_PROMPT) if streams else None,
    )


def _offload_experts(stage: Stage, machine: MachineProfile) -> tuple[list[list[Unit]], float]:
    """Return the routed experts of each layer that has some, and the seconds of their copies."""
    offloaded = [
        [unit for unit in units if unit.is_expert]
        for layer, units in zip(stage.layers, stage.units, strict=True)
        if layer.expert_bytes
    ]
    return offloaded, sum(machine.copy_seconds(sum(u.nbytes for u in each)) for each in offloaded)


def _streaming_wins(
    stage: Stage, machine: MachineProfile, workload: Workload
) -> Callable[[int], bool]:
    """Tell whether max(compute, copies) < compute + reading, were all experts offloaded.

    On an engine, where copies and compute take turns, whether copies < reading.
    """
    offloaded, copies_s = _offload_experts(stage, machine)
    compute = ModelCompute(stage, machine)

    def wins(batch: int) -> bool:
        read = sum(
            use_bytes(Backend.UVA, machine, units, stage.experts, batch) for units in offloaded
        )
        shape = decode_shape(workload.model_copy(update={"batch": batch}))
        resident_s = to_seconds(compute.price(shape).resident_ps)
        in_turns = stage.runner.pass_rules is not None
        streaming_s = resident_s + copies_s if in_turns else max(resident_s, copies_s)
        return streaming_s < resident_s + read / machine.uva.value

    return wins if offloaded else lambda batch: False


def _streaming_beats_cores(
    stage: Stage, machine: MachineProfile, workload: Workload
) -> Callable[[int], bool]:
    """Tell whether max(compute, copies) < compute + the cores' time, were all experts offloaded."""
    offloaded, copies_s = _offload_experts(stage, machine)
    compute = ModelCompute(stage, machine)

    def beats(batch: int) -> bool:
        uses = (find_use(units, machine, stage.experts, batch, None) for units in offloaded)
        cores_s = sum(use.seconds(machine, beside=False) for use in uses)
        shape = decode_shape(workload.model_copy(update={"batch": batch}))
        resident_s = to_seconds(compute.price(shape).resident_ps)
        return max(resident_s, copies_s) < resident_s + cores_s

    return beats if offloaded else lambda batch: False
