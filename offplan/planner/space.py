"""The plans of at most one rule: their memory by arithmetic, and proven bounds of their times.

No placement or schedule is built here. Plans come in groups, which differ in setting and pattern,
and in families, which differ in their pattern alone; only groups whose bound is good enough are
split.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from offplan.placement import Unit
from offplan.plan import Backend
from offplan.planner.classes import PricedClass, Totals
from offplan.planner.families import Family, Shortfall
from offplan.planner.patterns import Pattern
from offplan.planner.problem import Problem, slab_bytes
from offplan.planner.segments import SegmentClass
from offplan.planner.targets import NEVER, Goal, Time

PREFETCH_STEPS = (1, 2, 3, 4)
"""Ring sizes tried."""

BACKENDS = (
    (Backend.PREFETCH, Backend.PREFETCH),
    (Backend.PREFETCH, Backend.UVA),
    (Backend.UVA, Backend.UVA),
)
"""Prefill's and decode's backend. Decode by prefetch with prefill in place is not tried: a prompt's
rows are never fewer than a step's, so reading in place never suits the prompt better."""


def list_backends(problem: Problem) -> tuple[tuple[Backend, Backend], ...]:
    """BACKENDS, without those that the store does not serve, or an engine has no flag for."""
    kernels_reach = problem.machine.store == "host"
    return tuple(
        (prefill, decode)
        for prefill, decode in BACKENDS
        if (kernels_reach or Backend.UVA not in (prefill, decode))
        and (problem.restriction is None or prefill is decode)
    )


class Group(NamedTuple):
    """Families that fit and differ in their setting alone."""

    segment_class: SegmentClass
    totals: Totals
    patterns: tuple[Pattern, ...]
    prefill: Backend
    decode: Backend
    num_slots: int
    settings: tuple[int, ...]
    """By number."""

    @property
    def num_members(self) -> int:
        """How many candidates these are."""
        return len(self.settings) * len(self.patterns)


@dataclass(frozen=True)
class Singles:
    """The plans of at most one rule that fit."""

    problem: Problem
    families: list[Family]
    """Those without a pattern."""
    groups: list[Group]
    shortfall: Shortfall
    """What those that do not fit lack."""

    @property
    def num_members(self) -> int:
        """How many candidates these are."""
        in_families = sum(family.num_members for family in self.families)
        return in_families + sum(group.num_members for group in self.groups)

    def by_bound(self, goal: Goal) -> Iterator[tuple[Time, Family]]:
        """List the families that may reach the goal, the least bound first, then by rank."""
        heap: list[tuple[Time, tuple[object, ...], int, Family | Group]] = [
            (goal.value(*family[:2]), family.rank, 0, family) for family in self.families
        ]
        for number, group in enumerate(self.groups):
            # comes before the families of the same bound
            heap.append((goal.value(*self._least_ps(group)), (), number, group))
        heapify(heap)
        while heap and heap[0][0] < NEVER:
            bound, _, _, first = heappop(heap)
            if isinstance(first, Family):
                yield bound, first
                continue
            for family in self._split(first):
                heappush(heap, (goal.value(*family[:2]), family.rank, 0, family))

    @cached_property
    def _resident_ps(self) -> list[int]:
        """The prompt's compute, and the rows that it reads, for each setting."""
        return [each.prefill.resident_ps + each.row_ps[0] for each in self.problem.settings]

    @cached_property
    def _step_ps(self) -> int:
        return self.problem.decode.resident_ps

    def _least_ps(self, group: Group) -> tuple[int, int]:
        """No plan of a group takes less."""
        totals, num_slots = group.totals, group.num_slots
        prefill_ps = min([self._resident_ps[number] for number in group.settings])
        if group.prefill is Backend.UVA:
            prefill_ps += min(totals.prefill_uva_ps)
        else:
            compute_ps = min(totals.prefill_compute_ps) if num_slots == 1 else 0
            num_warm = num_slots if group.decode is Backend.PREFETCH else 0
            prefill_ps, _ = _ring_bound(totals, num_slots, num_warm, prefill_ps, compute_ps)
        return prefill_ps, self._decode_bound(group)[0]

    def _decode_bound(self, group: Group) -> tuple[int, int]:
        """Least time of a step that reads no embedding, and the bytes that it moves."""
        totals, num_slots = group.totals, group.num_slots
        if group.decode is Backend.PREFETCH:
            return _ring_bound(totals, num_slots, 0, self._step_ps, totals.decode_compute_ps)
        # as many layers as there are slots find their slab where prefill left it
        read_ps = totals.decode_uva_ps - num_slots * totals.slowest_uva_ps
        read_bytes = totals.decode_uva_bytes - num_slots * totals.most_uva_bytes
        return self._step_ps + max(0, read_ps), max(0, read_bytes)

    def _split(self, group: Group) -> Iterator[Family]:
        """Price a group's families."""
        problem, totals, num_slots = self.problem, group.totals, group.num_slots
        decode_ps, decode_bytes = self._decode_bound(group)
        num_warm = num_slots if group.decode is Backend.PREFETCH else 0
        for number in group.settings:
            setting = problem.settings[number]
            prefill_ps = setting.prefill.resident_ps
            if group.prefill is Backend.UVA:
                prefill_ps += totals.prefill_uva_ps[number]
                prefill_bytes = totals.prefill_uva_bytes[number]
            else:
                compute_ps = totals.prefill_compute_ps[number]
                prefill_ps, prefill_bytes = _ring_bound(
                    totals, num_slots, num_warm, prefill_ps, compute_ps
                )
            yield Family(
                prefill_ps=prefill_ps + setting.row_ps[0],
                decode_ps=decode_ps + setting.row_ps[1],
                link_bytes=problem.objective(
                    prefill_bytes + setting.row_bytes[0], decode_bytes + setting.row_bytes[1]
                ),
                prefetch_step=max(1, num_slots),
                minus_chunk=-setting.prefill_chunk,
                embeddings=setting.embeddings,
                num_segments=len(group.segment_class.segments),
                segments=group.segment_class.segments,
                prefill=group.prefill,
                decode=group.decode,
                max_bytes=0,
                patterns=group.patterns,
            )


def list_singles(problem: Problem, classes: Sequence[PricedClass]) -> Singles:
    """List the plans of at most one rule."""
    shortfall = Shortfall()
    families = list(_resident_families(problem, shortfall))
    groups: list[Group] = []
    for priced in classes:
        families += _max_bytes_families(problem, priced, shortfall)
        groups += _list_groups(problem, priced, shortfall)
    return Singles(problem, families, groups, shortfall)


def _list_groups(problem: Problem, priced: PricedClass, shortfall: Shortfall) -> Iterator[Group]:
    """List the groups of a class, each with the settings that it fits."""
    settings = sorted((each.lacking_bytes, i) for i, each in enumerate(problem.settings))
    lacking, numbers = [size for size, _ in settings], [number for _, number in settings]
    rings: dict[int, list[tuple[Backend, Backend]]] = {}
    for backends in list_backends(problem):
        for num_slots in PREFETCH_STEPS if Backend.PREFETCH in backends else (0,):
            rings.setdefault(num_slots, []).append(backends)
    for totals, patterns in priced.groups:
        lacks = [problem.host_lack(totals.slab_bytes, problem.settings[i]) for i in numbers]
        for num_slots, ring_backends in rings.items():
            if num_slots and totals.num_layers <= num_slots:
                continue  # every layer would own a slot: resident in all but name
            saved_bytes = totals.unit_bytes - num_slots * totals.slot_bytes
            num_settings = bisect_right(lacking, saved_bytes)
            host_lack = min(lacks[:num_settings], default=0)
            if not shortfall.note(lacking[0] - saved_bytes, host_lack):
                continue
            fitting = tuple(
                i for i, lack in zip(numbers[:num_settings], lacks, strict=False) if lack <= 0
            )
            for backends in ring_backends:
                yield Group(priced.segment_class, totals, patterns, *backends, num_slots, fitting)


def _resident_families(problem: Problem, shortfall: Shortfall) -> Iterator[Family]:
    for setting in problem.settings:
        if not shortfall.note(setting.lacking_bytes, problem.host_lack(0, setting)):
            continue
        yield Family(
            prefill_ps=setting.prefill.resident_ps + setting.row_ps[0],
            decode_ps=problem.decode.resident_ps + setting.row_ps[1],
            link_bytes=problem.objective(*setting.row_bytes),
            prefetch_step=1,
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            num_segments=0,
            segments=(),
            prefill=Backend.UVA,
            decode=Backend.UVA,
            max_bytes=0,
            patterns=(),
        )


def _ring_bound(
    totals: Totals,
    num_slots: int,
    num_warm: int,
    compute_ps: int,
    streamed_compute_ps: int,
) -> tuple[int, int]:
    """Least time and bytes of a pass that streams through a ring.

    Of n layers over K slots those whose slot nobody shares are not copied again: 2 K - n, where
    that is positive. Of the slots ``num_warm`` are found full: decode refills them for the prompt
    that follows, where it streams at all. With one slot, copies and the layers
    that stream take turns: none overlaps another.
    """
    owners = max(0, 2 * num_slots - totals.num_layers)
    skipped = max(owners, num_warm)
    copied_ps = max(0, totals.copy_ps - skipped * totals.slowest_copy_ps)
    copied_bytes = max(0, totals.slab_bytes - skipped * totals.slot_bytes)
    if num_slots == 1:
        copied_ps += streamed_compute_ps
    return max(compute_ps, copied_ps), copied_bytes


def _max_bytes_families(
    problem: Problem, priced: PricedClass, shortfall: Shortfall
) -> Iterator[Family]:
    """Read the first parameters in place, as few as fit: for each setting one candidate.

    More of them would only move more bytes, so no other ``max_bytes`` can be better.
    """
    taken = [
        (layer, unit) for layer, kind in enumerate(problem.kind_of) for unit in priced.units[kind]
    ]
    sums = list(accumulate(unit.nbytes for _, unit in taken))
    for setting in problem.settings:
        needed = setting.lacking_bytes
        if needed <= 0 or problem.machine.store == "peer":
            continue
        last = min(bisect_left(sums, needed), len(sums) - 1)
        max_bytes = _roundest(sums[last - 1] if last else 0, sums[last])
        if problem.restriction is not None:
            multiple = problem.restriction.max_bytes_unit
            max_bytes = -(-max_bytes // multiple) * multiple
            last = min(bisect_left(sums, max_bytes), len(sums) - 1)
        by_layer: dict[int, list[Unit]] = {}
        for layer, unit in taken[: last + 1]:
            by_layer.setdefault(layer, []).append(unit)
        host_bytes = sum(slab_bytes(units) for units in by_layer.values())
        if not shortfall.note(needed - sums[last], problem.host_lack(host_bytes, setting)):
            continue
        prefill, decode = zip(setting.row_ps, setting.row_bytes, strict=True)
        # equal layers are read alike: only the last one may be taken in part
        alike = Counter((problem.compute.keys[i], len(units)) for i, units in by_layer.items())
        examples = {(problem.compute.keys[i], len(units)): units for i, units in by_layer.items()}
        for key, count in alike.items():
            step = problem.read_step_in_place(examples[key])
            prompt = problem.read_in_place(examples[key], setting.chunk_tokens)
            decode = decode[0] + count * step[0], decode[1] + count * step[1]
            prefill = prefill[0] + count * prompt[0], prefill[1] + count * prompt[1]
        yield Family(
            prefill_ps=setting.prefill.resident_ps + prefill[0],
            decode_ps=problem.decode.resident_ps + decode[0],
            link_bytes=problem.objective(prefill[1], decode[1]),
            prefetch_step=1,
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            num_segments=len(priced.segment_class.segments),
            segments=priced.segment_class.segments,
            prefill=Backend.UVA,
            decode=Backend.UVA,
            max_bytes=max_bytes,
            patterns=(),
        )


def _roundest(low: int, high: int) -> int:
    """The roundest size above ``low`` and up to ``high``: all of them take the same parameters."""
    unit = 1 << high.bit_length()
    while high // unit * unit <= low:
        unit >>= 1
    return high // unit * unit
