"""The plans of one combination: group by group, those that may be better than a given value."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from offplan.plan import Backend
from offplan.planner.combinations import (
    TURNS,
    Candidate,
    Combination,
    Combinations,
)
from offplan.planner.context import Column, Context, Times, in_turns, streams
from offplan.planner.options import users_of
from offplan.planner.relaxation import Filled, Turn, Weighing
from offplan.planner.targets import NEVER, Goal, Time


def list_candidates(
    found: Combinations, combined: Combination, goal: Goal, limit: Time
) -> Iterator[Candidate]:
    """List a combination's plans that may be better than ``limit``."""
    context = found.context(combined.setting, combined.num_slots, TURNS[combined.turn], goal)
    relaxed = found.relax(combined.options, combined.backends, context, goal.cuts(limit))
    if relaxed is not None:
        yield from _Scan(found, combined, context, goal, limit).candidates(relaxed)


@dataclass
class _Scan:
    found: Combinations
    combined: Combination
    context: Context
    goal: Goal
    limit: Time

    def __post_init__(self) -> None:
        self.options = [self.found.options[number] for number in self.combined.options]
        self.lacking = self.found.problem.settings[self.combined.setting].lacking_bytes
        self.shared = self._shared_slots()

    def candidates(self, relaxed: Sequence[tuple[Filled, Weighing]]) -> Iterator[Candidate]:
        """List plans: by the weighing whose bound is nearest to what is wanted."""
        cuts = self.goal.cuts(self.limit)

        def nearness(each: tuple[Filled, Weighing]) -> float:
            most_ps = cuts[each[1].cut].most_ps
            return float(each[0].least / most_ps) if most_ps else NEVER

        filled, weighing = max(relaxed, key=nearness)
        columns = [
            self.context.column(*each, weighing, filled.rate)
            for each in zip(
                self.combined.options,
                self.options,
                self.combined.backends,
                in_turns(self.combined.backends, self.context),
                strict=True,
            )
        ]
        needed, spared_ps = self.found.needed(self.options, self.combined.backends, self.context)
        room = cuts[weighing.cut].most_ps - weighing.fixed_ps
        room_beyond = room + weighing.rates.prompt_copy * spared_ps - filled.rate * needed
        yield from self._extend(
            columns, (), self.lacking, float(room), float(room_beyond), (0, 0, 0, 0)
        )

    def _extend(
        self,
        columns: Sequence[Column],
        groups: tuple[int, ...],
        lacking: int,
        room: float,
        room_beyond: float,
        times: Times,
    ) -> Iterator[Candidate]:
        """Choose groups of the rules that have none yet, within what is left of each sum."""
        column, *others = columns
        needed = lacking + self.context.num_slots * self._slot_bytes(groups)
        start = bisect_left(column.sizes, needed - sum(other.sizes[-1] for other in others))
        room_here = room - sum(other.least_costs[0] for other in others)
        beyond_here = room_beyond - sum(other.least_excess for other in others)
        spent = times
        for other in others:
            times = _add(times, other.least_times[0])
        costs, excesses, sizes = column.costs, column.excesses, column.sizes
        for number in range(start, len(sizes)):
            if column.least_costs[number] >= room_here:
                break
            if costs[number] >= room_here or excesses[number] >= beyond_here:
                continue
            if self._exceeds(times, column.times[number]):
                if self._exceeds(times, column.least_times[number]):
                    break
                continue
            chosen = (*groups, number)
            if others:
                yield from self._extend(
                    others,
                    chosen,
                    lacking - sizes[number],
                    room - costs[number],
                    room_beyond - excesses[number],
                    _add(spent, column.times[number]),
                )
                continue
            slot = self._slot_bytes(chosen)
            if sizes[number] >= lacking + self.context.num_slots * slot:
                candidate = self._bound(chosen)
                if candidate is not None:
                    yield candidate

    def _exceeds(self, times: Times, more: Times) -> bool:
        """Whether no plan of this time, or a longer one, is better."""
        prompt, step = self.context.frames
        prefill_ps = prompt.least_ps(times[0] + more[0], times[1] + more[1])
        decode_ps = step.least_ps(times[2] + more[2], times[3] + more[3])
        return self.goal.value(prefill_ps, decode_ps) >= self.limit

    def _slot_bytes(self, groups: Sequence[int]) -> int:
        """What a slot must hold for these groups of the first rules."""
        layers = [
            option.groups[group][1].layers
            for option, group in zip(self.options, groups, strict=False)
        ]
        num_chosen = len(groups)
        for slot_bytes, among, rules in self.shared:
            if rules[-1] < num_chosen:
                both = among
                for rule in rules:
                    both &= layers[rule]
                if both:
                    return slot_bytes
        return 0

    def _shared_slots(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """What a slot holds if rules stream the same layer of a kind, the largest first."""
        streamed = [rule for rule, each in enumerate(self.combined.backends) if streams(each)]
        kinds = self.found.problem.layers_of_kind
        return sorted(
            (
                (sum(self.options[rule].costs[kind].slab_bytes for rule in rules), layers, rules)
                for number in range(1, len(streamed) + 1)
                for rules in combinations(streamed, number)
                for kind, layers in enumerate(kinds)
            ),
            reverse=True,
        )

    def _bound(self, groups: tuple[int, ...]) -> Candidate | None:
        """Bound a plan by itself; None unless it may be better."""
        taken = [
            option.taken(backends)[group]
            for option, group, backends in zip(
                self.options, groups, self.combined.backends, strict=True
            )
        ]
        if self.context.num_slots and self.context.turn is not Turn.KEEPS:
            step = users_of([rule for rule in taken if rule.backends[1] is Backend.PREFETCH])
            turns = step.bit_count() > self.context.num_slots
            if turns is not (self.context.turn is Turn.TURNS):
                return None
        where = self.combined.num_slots, self.combined.setting
        times = self.found.passes.least_ps(taken, *where, self.goal, self.limit)
        if times is None:
            return None
        longest, decode_ps = times
        for rule in taken:
            longest = max(longest, self.found.passes.alone_ps(rule, *where))
        bound = self.goal.value(longest, decode_ps)
        if bound >= self.limit:
            return None
        return Candidate(max(bound, self.combined.bound), decode_ps, groups)


def _add(first: Times, second: Times) -> Times:
    a, b, c, d = first
    return a + second[0], b + second[1], c + second[2], d + second[3]
