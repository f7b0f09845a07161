"""Plans of at most one rule in the order of their bounds: proven, by arithmetic on their sums.

No placement or schedule is built here. Plans come in groups, which differ in setting and pattern,
and in families, which differ in their pattern alone; only groups whose bound is good enough are
split.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from offplan.plan import Backend
from offplan.planner.classes import Totals
from offplan.planner.families import Family, Shortfall
from offplan.planner.patterns import Pattern
from offplan.planner.problem import Problem
from offplan.planner.segments import SegmentClass
from offplan.planner.targets import NEVER, Goal, Time


class FamilyGroup(NamedTuple):
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
    groups: list[FamilyGroup]
    shortfall: Shortfall
    """What those that do not fit lack."""

    @property
    def num_members(self) -> int:
        """How many candidates these are."""
        in_families = sum(family.num_members for family in self.families)
        return in_families + sum(group.num_members for group in self.groups)

    def by_bound(self, goal: Goal) -> Iterator[tuple[Time, Family]]:
        """List the families that may reach the goal, the least bound first, then by rank."""
        heap: list[tuple[Time, tuple[object, ...], int, Family | FamilyGroup]] = [
            (goal.value(*family[:2]), family.rank, 0, family) for family in self.families
        ]
        for number, group in enumerate(self.groups):
            # comes before the families of the same bound
            heap.append((goal.value(*self.least_ps(group)), (), number, group))
        heapify(heap)
        while heap and heap[0][0] < NEVER:
            bound, _, _, first = heappop(heap)
            if isinstance(first, Family):
                yield bound, first
                continue
            for family in self.split(first):
                heappush(heap, (goal.value(*family[:2]), family.rank, 0, family))

    @cached_property
    def _resident_ps(self) -> list[int]:
        """The prompt's compute, and the rows that it reads, for each setting."""
        return [self.problem.resident_ps(each)[0] for each in self.problem.settings]

    @cached_property
    def _step_ps(self) -> int:
        """The step's compute."""
        return self.problem.decode.resident_ps

    def least_ps(self, group: FamilyGroup) -> tuple[int, int]:
        """No plan of a group takes less in a prompt, and in a decode step."""
        resident_ps = min(self._resident_ps[number] for number in group.settings)
        return _prompt_bound(group, resident_ps, min)[0], self._step_bound(group)[0]

    def _step_bound(self, group: FamilyGroup) -> tuple[int, int]:
        """Least time of a step that reads no embedding, and the bytes that it moves."""
        totals, num_slots, step_ps = group.totals, group.num_slots, self._step_ps
        if group.decode is Backend.PREFETCH:
            return _ring_bound(totals, num_slots, 0, step_ps, totals.decode_compute_ps)
        # as many layers as there are slots find their slab where prefill left it
        read_ps = totals.decode_uva_ps - num_slots * totals.slowest_uva_ps
        read_bytes = totals.decode_uva_bytes - num_slots * totals.most_uva_bytes
        return step_ps + max(0, read_ps), max(0, read_bytes)

    def split(self, group: FamilyGroup) -> Iterator[Family]:
        """Price a group's families."""
        decode_ps, decode_bytes = self._step_bound(group)
        for number in group.settings:
            setting = self.problem.settings[number]
            prefill_ps, prefill_bytes = _prompt_bound(
                group, setting.prefill.resident_ps, itemgetter(number)
            )
            yield Family(
                prefill_ps=prefill_ps + setting.row_ps[0],
                decode_ps=decode_ps + setting.row_ps[1],
                link_bytes=self.problem.objective(
                    prefill_bytes + setting.row_bytes[0], decode_bytes + setting.row_bytes[1]
                ),
                prefetch_step=max(1, group.num_slots),
                minus_chunk=-setting.prefill_chunk,
                embeddings=setting.embeddings,
                segments=group.segment_class.segments,
                prefill=group.prefill,
                decode=group.decode,
                max_bytes=0,
                patterns=group.patterns,
            )


def _prompt_bound(
    group: FamilyGroup, resident_ps: int, choose: Callable[[Sequence[int]], int]
) -> tuple[int, int]:
    """Least time and bytes of a prompt; ``choose`` takes one of the figures of all settings."""
    totals, num_slots = group.totals, group.num_slots
    if group.prefill is Backend.UVA:
        return resident_ps + choose(totals.prefill_uva_ps), choose(totals.prefill_uva_bytes)
    compute_ps = choose(totals.prefill_compute_ps) if num_slots == 1 else 0
    num_warm = num_slots if group.decode is Backend.PREFETCH else 0
    return _ring_bound(totals, num_slots, num_warm, resident_ps, compute_ps)


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
