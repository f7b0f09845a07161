"""Costs of caching experts on the GPU one by one, beside the memory of the slots.

A decode step has the experts cross that it chooses and that no slot holds. Their share follows from
a routing profile, or from uniform routing: of n experts in slots, n / E of the choices are served.
Experts that the host's cores multiply, all or a part, enter no slot, and steps soon miss them
again. Kernels of the step keep the order of use. A prompt leaves the experts of its last tokens in
the slots: from the ring, if its layers stream, or else over the link.

The host's cores may multiply a share of the experts that a step misses in a layer, where they lie.
The link brings the others. Both work at once with each other and with the GPU's products of the
experts that it found, and of shared ones. The layer waits for the longest of the three.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, comb
from typing import NamedTuple

from offplan.backends import Backend
from offplan.capabilities.cached_experts import Division, ExpertsFound, ExpertSlots
from offplan.checkpoint.model import Experts
from offplan.costs.cores import CoresUse
from offplan.costs.in_place_costs import AtUse, CachedTimes
from offplan.costs.pass_compute import PassCompute
from offplan.costs.term import Input
from offplan.costs.timeline import PassTimes, to_ps, to_seconds
from offplan.costs.work import PassShape
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, SlabEntry
from offplan.routing.profile import BatchReuse

KEEPING_S = 8e-6
"""Seconds that a layer takes to find the experts of a step and to begin with those missed.

Source: 8 layers of Qwen3-30B-A3B in FP8 on an H200, beside the same layers resident. A layer took
3.1 us if all were hit, 2.3 % of a step. It took 4.4 us more to begin if some were missed.
"""
DIVIDING_S = 18e-6
"""Seconds that a layer takes to divide its missed experts, whoever multiplies them.

Source: 12 layers of Qwen3-30B-A3B in FP8 on an H200, with two routings and two shares each. They
took 7 to 23 us a layer beyond what ``Missed`` predicts besides.
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


def predict_found(placement: Placement, stage: Stage, batch: int) -> ExpertsFound | None:
    """Predict the hits and misses of a decode step, over all layers; None if none keep experts."""
    caches = placement.caches_of(ExpertSlots).values()
    if stage.experts is None or not caches:
        return None
    found = [find_experts(each, stage.experts, stage.reuse(batch), batch) for each in caches]
    return ExpertsFound(
        sum(each.hits for each in found),
        sum(each.misses for each in found),
        sum(each.by_cores for each in found),
    )


def list_misses(
    placement: Placement, stage: Stage, batch: int, times: PassTimes
) -> tuple[str, tuple[Input, ...]]:
    """Say what misses add to the bytes over the link of a decode step, and what they follow from.

    Returns no words and no inputs if no experts are kept.
    """
    caches = placement.caches_of(ExpertSlots).values()
    if (found := predict_found(placement, stage, batch)) is None:
        return "", ()
    words = ", and experts missed x bytes of an expert"
    words += ", less what the host's cores read" if times.missed_ps else ""
    if not (chosen := found.hits + found.misses):
        return words, ()
    source = "uniform routing: kept / experts of a layer"
    if stage.reuse(batch) is not None and stage.routing is not None:
        source = f"routing profile {stage.routing.fingerprint[:12]}, batch {batch}"
    return words, (
        Input("layers that keep experts", len(caches), "count"),
        Input("experts kept in all", sum(each.num_kept for each in caches), "count"),
        Input("experts that a step chooses in these layers", chosen, "count"),
        Input("hit rate", found.hits / chosen, "count", source),
        Input("experts missed", found.misses, "count"),
        Input("bytes of an expert", max(each.expert_bytes for each in caches), "bytes"),
    )


def list_waits(times: PassTimes, stage: Stage, machine: MachineProfile) -> Iterator[Input]:
    """Yield what kernels take to keep experts, if any do."""
    if keeping := sum(times.keeping_ps):
        yield Input("kernels that keep experts", to_seconds(keeping), "s")


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


class Missed(NamedTuple):
    """The experts that a layer of a decode step misses, and the work meanwhile.

    Shared experts count as the GPU's, also where another rule has the cores multiply them.
    """

    slots: ExpertSlots
    found: ExpertsFound
    chosen: CoresUse
    """Work of the host's cores if they multiplied all experts that the step chooses."""

    @property
    def cores(self) -> CoresUse:
        """Work of the host's cores on the missed experts."""
        num_bytes = round(self.slots.expert_bytes * self.found.by_cores)
        return self.chosen._replace(num_bytes=num_bytes, num_products=int(num_bytes > 0))

    def waiting_ps(self, machine: MachineProfile, layer_ps: int, *, copies: bool) -> int:
        """Picoseconds that the layer takes beyond its compute and its reading over the link.

        It is the mean over the numbers of experts that the layer may miss. It is negative where
        products of found and shared experts hide more than the cores are late by. Such products
        take as long as their bytes at the rate of GPU memory, at least; ``layer_ps`` is the compute
        of the whole layer. ``copies`` says whether the step copies through the ring.
        """
        if not self.slots.host_share:
            return 0
        found, expert_bytes, rate = self.found, self.slots.expert_bytes, Backend.UVA.rate(machine)
        link_ps = to_ps(brought_bytes(self.slots, found) / rate.value)
        meanwhile = found.hits * expert_bytes + self.chosen.shared_bytes
        meanwhile_ps = min(layer_ps, to_ps(meanwhile / machine.hbm.value))
        one = self.chosen._replace(num_products=1, shared_bytes=0)
        beside = copies or found.brought > 0
        trip_s = one._replace(num_bytes=0).seconds(machine, beside=beside)
        expert_s = one._replace(num_bytes=expert_bytes).seconds(machine, beside=beside) - trip_s
        longest_s = 0.0
        for likely, missed in spread(found.hits + found.misses, found.misses):
            by_cores = self.slots.count_by_cores(*self.slots.divide(missed))
            cores_s = trip_s + by_cores * expert_s if by_cores else 0.0
            link_s = (missed - by_cores) * expert_bytes / rate.value
            longest_s += likely * max(meanwhile_ps / 1e12, link_s, cores_s)
        return to_ps(longest_s + DIVIDING_S) - meanwhile_ps - link_ps


def cached_times(
    placement: Placement,
    entries: Mapping[int, Sequence[SlabEntry]],
    at_use: AtUse,
    priced: PassCompute,
) -> Iterator[tuple[int, CachedTimes]]:
    """Yield what a pass takes for the experts that each layer keeps, by layer index.

    They cross in decode if they are missed. They cross once more to be left there by a prompt.
    ``entries`` are what each layer reads at use.
    """
    shapes, machine, experts = priced.shapes, at_use.machine, at_use.stage.experts
    if experts is None:
        return
    is_step, copies = shapes[0].phase is Phase.DECODE, bool(placement.spans(Phase.DECODE))
    for layer, slots in placement.caches_of(ExpertSlots).items():
        kept = [entry for entry in entries[layer] if entry.is_cached]
        way = kept[0].backend(shapes[0].phase) if kept else None  # None streams
        keeping = keeping_ps(slots, experts, machine, shapes, streams=way is None)
        read = Counter[Backend]()
        if not is_step:
            if way is not None:
                read[way] = left_bytes(slots, experts, shapes)
            yield layer, CachedTimes(keeping, read)
            continue
        found = find_experts(slots, experts, at_use.reuse, at_use.batch)
        served = kept if slots.host_share else ()
        missed = Missed(slots, found, at_use.cores((of.unit, Backend.HOST) for of in served))
        read[Backend.UVA] = brought_bytes(slots, found)
        waiting = missed.waiting_ps(machine, priced.layer_ps[layer], copies=copies)
        yield layer, CachedTimes(keeping, read, waiting, missed.cores)
