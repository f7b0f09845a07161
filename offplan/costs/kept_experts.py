"""Costs of caching experts on the GPU one by one, beside the memory of the slots.

A decode step has the experts cross that it chooses and that no slot holds. Their share follows from
a routing profile, or from uniform routing: of n experts in slots, n / E of the choices are served.
Experts that the host's cores multiply, all or a part, enter no slot, and steps soon miss them
again. Kernels of the step keep the order of use. A prompt leaves the experts of its last tokens in
the slots: from the ring, if its layers stream, or else over the link.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, comb

from offplan.checkpoint.model import Experts
from offplan.costs.term import Input
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape
from offplan.expert_slots import Division, ExpertsFound, ExpertSlots
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.routing.profile import BatchReuse

KEEPING_S = 8e-6
"""Seconds that a layer takes to find the experts of a step and to begin with those missed.

Source: 8 layers of Qwen3-30B-A3B in FP8 on an H200, beside the same layers resident. A layer took
3.1 us if all were hit, 2.3 % of a step. It took 4.4 us more to begin if some were missed.
"""
LAST_TOKENS = 64
"""Tokens of each prompt whose experts are in the slots when it ends, as if they had been steps."""


_ROUNDS = 8
"""Times that the hits and what enters slots are predicted from each other."""


def find_experts(
    slots: ExpertSlots, experts: Experts, reuse: BatchReuse | None, batch: int
) -> ExpertsFound:
    """Predict what a decode step finds of one layer's experts in its slots.

    Of a part q of the choices, the expert is in a slot behind the step: it was there, or the link
    brought it. The slots then reach as far back in the order of use as 1 / q times as many would
    that all choices enter. The next choice of such an expert is a hit if it comes within that
    reach. So the hit rate is q times that of n / q slots.

    Misses predicted so are 0.8 to 1.1 of a list's where tokens choose the last token's experts
    again. If some experts are popular with all tokens, a list has fewer misses, down to a half.
    """
    chosen = experts.touched(batch) if reuse is None else reuse.touched
    kept = slots.num_kept
    static = kept / experts.num_experts
    rate = static if reuse is None else reuse.hit_rate(kept)

    def mean(count: Callable[[Division], float]) -> float:
        return sum(
            weight * count(slots.divide(missed))
            for weight, missed in spread(chosen, chosen * (1 - rate))
        )

    if slots.host_share and reuse is not None:
        for _ in range(_ROUNDS):
            entering = 1 - mean(lambda of: of.experts + bool(of.chunks)) / chosen
            reached = reuse.hit_rate(kept / entering) if entering > 0 else 0.0
            rate = max(entering * reached, min(rate, static))
    hits = chosen * rate
    by_cores = mean(lambda of: slots.count_by_cores(*of)) if slots.host_share else 0.0
    return ExpertsFound(hits, chosen - hits, by_cores)


def spread(chosen: float, missed: float) -> Iterator[tuple[float, int]]:
    """Yield how likely a layer misses each number of experts: ``missed`` of ``chosen`` in the mean.

    They are missed independently of one another.
    """
    most = ceil(chosen)
    share = missed / most
    for number in range(most + 1):
        likely = comb(most, number) * share**number * (1 - share) ** (most - number)
        yield likely, number


def brought_bytes(slots: ExpertSlots, found: ExpertsFound) -> int:
    """Bytes that the link brings of the experts that a step misses in one layer."""
    return round(slots.expert_bytes * found.brought)


@dataclass(frozen=True)
class KeptUse:
    """The experts in slots that a decode step is predicted to find, over all layers."""

    num_layers: int
    """Layers that keep experts."""
    num_kept: int
    """Experts in slots."""
    found: ExpertsFound
    """Hits and misses of a step."""
    expert_bytes: int
    """Bytes of an expert; the largest where layers differ."""
    source: str
    """Source of the hits: a profile, by its fingerprint, or uniform routing."""

    @property
    def chosen(self) -> float:
        """Experts that a step chooses."""
        return self.found.hits + self.found.misses


def predict_use(placement: Placement, stage: Stage, batch: int) -> KeptUse | None:
    """Predict the hits and misses of a decode step; None if no experts are kept."""
    experts, reuse = stage.experts, stage.reuse(batch)
    if experts is None or not placement.expert_slots:
        return None
    layers = placement.expert_slots.values()
    found = [find_experts(each, experts, reuse, batch) for each in layers]
    source = "uniform routing: kept / experts of a layer"
    if reuse is not None and stage.routing is not None:
        source = f"routing profile {stage.routing.fingerprint[:12]}, batch {batch}"
    return KeptUse(
        num_layers=len(layers),
        num_kept=sum(each.num_kept for each in layers),
        found=ExpertsFound(
            sum(each.hits for each in found),
            sum(each.misses for each in found),
            sum(each.by_cores for each in found),
        ),
        expert_bytes=max(each.expert_bytes for each in layers),
        source=source,
    )


def list_use(use: KeptUse | None) -> tuple[Input, ...]:
    """List what the miss rate of a decode step follows from; nothing if no experts are kept."""
    if use is None or not use.chosen:
        return ()
    return (
        Input("layers that keep experts", use.num_layers, "count"),
        Input("experts kept in all", use.num_kept, "count"),
        Input("experts that a step chooses in these layers", use.chosen, "count"),
        Input("hit rate", use.found.hits / use.chosen, "count", use.source),
        Input("experts missed", use.found.misses, "count"),
        Input("bytes of an expert", use.expert_bytes, "bytes"),
    )


def left_bytes(slots: ExpertSlots, experts: Experts, shapes: Sequence[PassShape]) -> int:
    """Bytes of the experts that a prompt of these chunks leaves in a layer's slots."""
    tokens = min(LAST_TOKENS, sum(shape.tokens for shape in shapes))
    filled = min(slots.num_kept, experts.touched(shapes[0].batch * tokens))
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
