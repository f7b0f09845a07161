"""What it takes that rules keep experts on the GPU one by one, beside the memory of the slots.

A decode step has the experts cross that it chooses and that no slot holds. Their share follows from
a routing profile, or from uniform routing: of n experts in slots, n / E of the choices are served.
Kernels of the step keep the order of use. A prompt leaves the experts of its last tokens in the
slots: from the ring, if its layers stream, or else over the link.
"""

from collections.abc import Sequence

from offplan.checkpoint.model import Experts
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape
from offplan.expert_slots import ExpertSlots
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.routing.profile import BatchReuse

KEEPING_S = 3e-6
"""Seconds of a layer's kernels that find the experts of a step and make room for those missed.

Source: estimated, as two launches within a captured step; not measured yet.
"""
LAST_TOKENS = 64
"""Tokens of each prompt whose experts are in the slots when it ends, as if they had been steps."""


def hit_rate(experts: Experts, reuse: BatchReuse | None, num_kept: int) -> float:
    """Share of a step's choices that so many experts in slots serve."""
    return num_kept / experts.num_experts if reuse is None else reuse.hit_rate(num_kept)


def left_bytes(slots: ExpertSlots, experts: Experts, shapes: Sequence[PassShape]) -> int:
    """Bytes of the experts that a prompt of these chunks leaves in a layer's slots."""
    tokens = min(LAST_TOKENS, sum(shape.tokens for shape in shapes))
    filled = min(slots.num_slots, experts.touched(shapes[0].batch * tokens))
    return round(filled * slots.expert_bytes)


def keeping_ps(
    slots: ExpertSlots,
    experts: Experts,
    machine: MachineProfile,
    shapes: Sequence[PassShape],
    *,
    streams: bool,
) -> int:
    """Picoseconds that a layer's kernels take to keep its experts in a pass of these chunks.

    ``streams`` says whether a prompt copies what it leaves from the ring, in GPU memory.
    """
    moved = 2 * left_bytes(slots, experts, shapes) if streams else 0
    return to_ps(KEEPING_S + moved / machine.hbm.value)


def keeping_by_layer(
    placement: Placement,
    experts: Experts | None,
    machine: MachineProfile,
    num_layers: int,
    shapes: Sequence[PassShape],
) -> tuple[int, ...]:
    """Picoseconds of each layer's kernels that keep experts, in a pass of these chunks."""
    found = [0] * num_layers
    if experts is None:
        return tuple(found)
    is_prompt = shapes[0].phase is Phase.PREFILL
    kept = (entry for entry in placement.entries if entry.keeps_experts)
    streams = {entry.unit.layer: entry.prefill.streams for entry in kept}
    for layer, slots in placement.expert_slots.items():
        in_ring = is_prompt and streams[layer]
        found[layer] = keeping_ps(slots, experts, machine, shapes, streams=in_ring)
    return tuple(found)
