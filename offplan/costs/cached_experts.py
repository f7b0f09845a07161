"""Costs of caching experts on the GPU one by one, beside the memory of the slots.

A decode step has the experts cross that it chooses and that no slot holds. Their share follows from
a routing profile, or from uniform routing: of n experts in slots, n / E of the choices are served.
Kernels of the step keep the order of use. A prompt leaves the experts of its last tokens in
the slots: from the ring, if its layers stream, or else over the link.

The host's cores may multiply some of the experts that a step misses in a layer, where they lie.
The link brings the others. Both work at once with each other and with the GPU's products of the
experts that it found, and of shared ones. The layer waits for the longest of the three. What the
cores multiplied the link brings for later, as far as it is idle: no step waits for that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache
from math import ceil, comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.backends import Backend
from offplan.capabilities.cached_experts import (
    LATER_FADES,
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
    ExpertsFound,
    ExpertSlots,
    FoundAnywhere,
    MissRates,
)
from offplan.checkpoint.model import Experts
from offplan.costs.cores import CoresUse
from offplan.costs.in_place_costs import AtUse, CachedTimes
from offplan.costs.pass_compute import PassCompute
from offplan.costs.simulated_slots import Simulated, simulate
from offplan.costs.term import Input
from offplan.costs.timeline import PassTimes, to_ps, to_seconds
from offplan.costs.work import PassShape
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, SlabEntry
from offplan.routing.profile import BatchReuse
from offplan.schedule import read_at_use

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
LATER_SHARE = 0.85
"""Part of the time that the link is idle in a step which copies for later take. Source: chosen."""
LATER_DELAY = 0.24
"""Share of the time of copies for later by which they lengthen a step.

They share the host's memory with the cores, and the link with what the step itself misses. Source:
gpt-oss-20b in 8 GiB on an H200 (``benchmarks/results/peers-freetoken-h200.json``). Beside a step
without them, 4.5 experts took 0.30 ms and 9 took 0.64. gpt-oss-120b's 12 took some 0.7, and 13.5
of Qwen3-30B 0.3. With a profile all / half / none of them gave the latter 8.24 / 8.68 / 9.20 ms.
"""
_MOST_SIMULATIONS = 64
"""Simulations that are kept: one for each profile's batch and way of dividing."""


def find_experts(
    slots: ExpertSlots,
    experts: Experts,
    reuse: BatchReuse | None,
    num_tokens: int,
    rates: MissRates | None = None,
) -> ExpertsFound:
    """Predict what a decode step of so many tokens finds of one layer's experts in its slots.

    ``rates`` are those by which cores and link divide what is missed; None if the link brings all.
    If every chosen expert enters a slot, the hit rate is that of the profile. What the cores
    multiply enters one if the link brings it for later: ``simulated_slots`` tells how many more
    are missed where it does not.
    """
    chosen = experts.touched(num_tokens) if reuse is None else reuse.touched
    kept = slots.num_kept
    rate = kept / experts.num_experts if reuse is None else reuse.hit_rate(kept)
    if rates is None or not slots.by_cores:
        return ExpertsFound(chosen * rate, chosen * (1 - rate))
    divided, later = divide_all(slots, rates, ceil(chosen)), 0.0
    missed = chosen * (1 - rate)
    if reuse is not None and kept and missed:
        used = LATER_FADES * LATER_STEPS * chosen  # what a layer's faded count comes to
        later = slots.later if slots.brings_later(used, used * rate) else 0.0
        ratio = _simulate(reuse, divided).at(kept, later / LATER_PARTS / missed)
        missed = min(chosen, missed * ratio)
    by_cores, not_brought = divided.mean(chosen, missed)
    later = min(later / LATER_PARTS, not_brought)
    return ExpertsFound(chosen - missed, missed, by_cores, later)


_simulations: dict[tuple[int, bytes], tuple[BatchReuse, Simulated]] = {}


def _simulate(reuse: BatchReuse, divided: "Divided") -> Simulated:
    """Simulate what steps miss, or return what was simulated before of the same."""
    # a step chooses one more at times than in the mean; a profile is compared by what it is
    not_brought = [*divided.not_brought.astype(int), int(divided.not_brought[-1]) + 1]
    key = id(reuse), bytes(divided.not_brought)
    if key not in _simulations:
        if len(_simulations) >= _MOST_SIMULATIONS:
            _simulations.clear()
        _simulations[key] = reuse, simulate(reuse, not_brought, MOST_LATER)
    return _simulations[key][1]


class Divided(NamedTuple):
    """The divisions of each number of experts that a layer may miss in a step."""

    by_cores: NDArray[np.float64]
    """Experts that the host's cores multiply, a part of one as that part."""
    not_brought: NDArray[np.float64]
    """Experts that enter no slot at once: the cores multiply them, all or a part."""

    def mean(self, chosen: float, missed: float) -> tuple[float, float]:
        """Return the means of both, where ``missed`` of ``chosen`` are missed in the mean."""
        likely = spread(chosen, missed)
        return float(likely @ self.by_cores), float(likely @ self.not_brought)


def divide_all(slots: ExpertSlots, rates: MissRates, most: int) -> Divided:
    """Divide each number of missed experts up to ``most``."""
    # neither depends on how many there is room for, so that all sizes of a cache have one
    return _divide_all(replace(slots, num_slots=2 if slots.splits else 1, later=0), rates, most)


@lru_cache(maxsize=256)
def _divide_all(slots: ExpertSlots, rates: MissRates, most: int) -> Divided:
    of = [slots.divide(number, rates) for number in range(most + 1)]
    return Divided(
        np.array([slots.count_by_cores(*each) for each in of]),
        np.array([float(each.experts + bool(each.chunks)) for each in of]),
    )


def spread(chosen: float, missed: float) -> NDArray[np.float64]:
    """Return how likely a layer misses 0, 1, ... experts: ``missed`` of ``chosen`` in the mean.

    They are missed independently of one another.
    """
    most = ceil(chosen)
    share, numbers = missed / most, np.arange(most + 1)
    likely: NDArray[np.float64] = (
        _combinations(most) * share**numbers * (1 - share) ** (most - numbers)
    )
    return likely


@lru_cache(maxsize=64)
def _combinations(most: int) -> NDArray[np.float64]:
    return np.array([float(comb(most, number)) for number in range(most + 1)])


def find_rates(slots: ExpertSlots, one: CoresUse, machine: MachineProfile) -> MissRates:
    """Find the rates by which cores and link divide what a layer misses, from a profile.

    ``one`` is the cores' work on the layer, of which its slowness counts. The cores read beside
    copies: the link brings experts meanwhile, now or for later.
    """
    one = one._replace(num_products=1, shared_bytes=0)
    trip_s, expert_s = (
        one._replace(num_bytes=size).seconds(machine, beside=True)
        for size in (0, slots.expert_bytes)
    )
    link_s = slots.expert_bytes / Backend.UVA.rate(machine).value
    return MissRates(trip_s, expert_s - trip_s, link_s)


def brought_bytes(slots: ExpertSlots, found: ExpertsFound) -> int:
    """Bytes that the link brings of the experts that a step misses in one layer."""
    return round(slots.expert_bytes * found.brought)


def predict_found(
    placement: Placement,
    stage: Stage,
    batch: int,
    machine: MachineProfile | None,
    sizes: Sequence[tuple[int, float]] = ((1, 1.0),),
) -> ExpertsFound | FoundAnywhere | None:
    """Predict the hits and misses of a decode step, over all layers; None if none keep experts.

    Of passes of several ``sizes`` it is the mean: tokens of each, and the share that has so many.
    Of no machine it is what follows from no rates, where cores and link divide misses by them: by
    uniform routing hits and misses alone, and None with reuse.
    """
    caches = placement.caches_of(ExpertSlots)
    if (experts := stage.experts) is None or not caches:
        return None
    lacks_rates = machine is None and any(slots.by_cores for slots in caches.values())
    reuses = [stage.reuse(batch, tokens) for tokens, _ in sizes]
    if lacks_rates and any(reuse is not None for reuse in reuses):
        return None
    entries, total = read_at_use(placement, Phase.DECODE), np.zeros(len(fields(ExpertsFound)))
    for (tokens, share), reuse in zip(sizes, reuses, strict=True):
        at_use = None if machine is None else AtUse(stage, machine, batch, tokens)
        for layer, slots in caches.items():
            if at_use is None:
                found = find_experts(slots, experts, reuse, batch * tokens)
            else:
                found = Missed.of(slots, entries[layer], at_use).found
            total += share * np.array(astuple(found))
    mean = ExpertsFound(*total.tolist())
    return FoundAnywhere(mean.hits, mean.misses) if lacks_rates else mean


def list_misses(
    placement: Placement, stage: Stage, batch: int, machine: MachineProfile, times: PassTimes
) -> tuple[str, tuple[Input, ...]]:
    """Say what misses add to the bytes over the link of a decode step, and what they follow from.

    Returns no words and no inputs if no experts are kept.
    """
    caches = placement.caches_of(ExpertSlots).values()
    if (found := predict_found(placement, stage, batch, machine)) is None:
        return "", ()
    words = ": read are also experts missed x bytes of an expert"
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
    if times.later_ps:
        delay_s, source = LATER_DELAY * to_seconds(times.later_ps), f"{LATER_DELAY} of their time"
        yield Input("copies for later, among what waits for the cores", delay_s, "s", source)


def later_parts(idle_ps: float, expert_bytes: int, machine: MachineProfile) -> int:
    """Count the LATER_PARTS of an expert of each layer that an idle link may bring for later.

    ``expert_bytes`` are those of one expert of each layer.
    """
    fitting = LATER_SHARE * idle_ps / to_ps(expert_bytes / machine.h2d.value)
    return int(LATER_PARTS * min(MOST_LATER, max(0.0, fitting)))


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
    rates: MissRates | None
    """Rates by which cores and link divide them; None if the link brings all."""

    @classmethod
    def of(cls, slots: ExpertSlots, entries: Sequence[SlabEntry], at_use: AtUse) -> "Missed":
        """Predict them for a layer that has these entries in host memory."""
        served = [of.unit for of in entries if of.is_cached] if slots.by_cores else []
        return cls.predict(slots, at_use, at_use.cores((unit, Backend.HOST) for unit in served))

    @classmethod
    def predict(cls, slots: ExpertSlots, at_use: AtUse, chosen: CoresUse) -> "Missed":
        """Predict them, given the cores' work on all that a step chooses."""
        experts = at_use.stage.experts
        assert experts is not None
        rates = find_rates(slots, chosen, at_use.machine) if slots.by_cores else None
        found = find_experts(slots, experts, at_use.reuse, at_use.num_tokens, rates)
        return cls(slots, found, chosen, rates)

    @property
    def cores(self) -> CoresUse:
        """Work of the host's cores on the missed experts."""
        num_bytes = round(self.slots.expert_bytes * self.found.by_cores)
        return self.chosen._replace(num_bytes=num_bytes, num_products=int(num_bytes > 0))

    @property
    def later_bytes(self) -> int:
        """Bytes that the link brings for later."""
        return round(self.slots.expert_bytes * self.found.later)

    def waiting_ps(self, machine: MachineProfile, layer_ps: int) -> int:
        """Picoseconds that the layer takes beyond its compute and its reading over the link.

        It is the mean over the numbers of experts that the layer may miss. Copies for later
        lengthen it by LATER_DELAY of their time. It is negative where products of found and shared
        experts hide more than the cores are late by. Such products take as long as their bytes at
        the rate of GPU memory, at least; ``layer_ps`` is the compute of the whole layer.

        Several rows wait by the rates of one. Source: four sequences on an H200 waited 0.93 of this
        with gpt-oss-20b, 0.94 with Qwen3-30B in FP8, and 1.02 with packed DeepSeek-V2-Lite.
        """
        if self.rates is None:
            return 0
        found, slots = self.found, self.slots
        link_ps = to_ps(brought_bytes(slots, found) / Backend.UVA.rate(machine).value)
        meanwhile = found.hits * slots.expert_bytes + self.chosen.shared_bytes
        meanwhile_ps = min(layer_ps, to_ps(meanwhile / machine.hbm.value))
        chosen = found.hits + found.misses
        by_cores = divide_all(slots, self.rates, ceil(chosen)).by_cores
        cores_s = (by_cores > 0) * self.rates.trip_s + by_cores * self.rates.cores_s
        link_s = (np.arange(len(by_cores)) - by_cores) * self.rates.link_s
        longest_s = np.maximum(np.maximum(cores_s, link_s), meanwhile_ps / 1e12)
        mean_s = float(spread(chosen, found.misses) @ longest_s)
        delay_s = LATER_DELAY * self.later_bytes / machine.h2d.value
        return to_ps(mean_s + DIVIDING_S + delay_s) - meanwhile_ps - link_ps


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
    is_step = shapes[0].phase is Phase.DECODE
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
        missed = Missed.of(slots, kept, at_use)
        read[Backend.UVA] = brought_bytes(slots, missed.found)
        waiting = missed.waiting_ps(machine, priced.layer_ps[layer])
        yield layer, CachedTimes(keeping, read, waiting, missed.cores, missed.later_bytes)
