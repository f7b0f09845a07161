"""The plans of one combination: group by group, those that may be better than a given value."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offplan.plan import Backend
from offplan.planner.combinations import (
    TURNS,
    Candidate,
    Combination,
    Combinations,
)
from offplan.planner.context import Column, Context, Times, in_turns, streams
from offplan.planner.options import Turns, users_of
from offplan.planner.relaxation import Filled, Turn, Weighing
from offplan.planner.targets import NEVER, Goal, Time


def list_candidates(
    found: Combinations, combined: Combination, goal: Goal, limit: Time
) -> list[Candidate]:
    """List a combination's plans that may be better than ``limit``."""
    turn, num_slots = TURNS[combined.turn], combined.num_slots
    context = found.context((combined.setting,), num_slots, turn, goal)
    by_byte = context
    if turn is Turn.KEEPS:  # one ring is as good as another
        by_byte = found.context((combined.setting,), min(1, num_slots), turn, goal)
    relaxed = found.relax(combined.options, combined.backends, by_byte, goal.cuts(limit))
    if relaxed is None:
        return []
    return _Scan(found, combined, context, goal, limit).candidates(relaxed)


class _Level(NamedTuple):
    """What the choice of one rule's group goes by."""

    column: Column
    layers: list[int]
    """Of each group, as bits."""
    slots: list[tuple[int, int, tuple[int, ...]]]
    """What a slot holds if this rule and those before it stream the same layer of a kind."""
    prompt_ps: list[tuple[int, int]]
    """Layers of a kind, and what one takes of the link in a prompt if no other rule streams it."""
    step_ps: list[tuple[int, int]]
    spared_ps: list[int]
    """What each group's sums leave out of a decode step's reading; empty if nothing is kept."""
    most_after: int
    """Bytes that the rules after it can take."""
    cost_after: float
    """What they cost at least, and so on."""
    excess_after: float
    times_after: Times


class _Prefix(NamedTuple):
    """Groups of the first rules."""

    groups: tuple[int, ...]
    layers: tuple[int, ...]
    prompt_users: int
    """Layers that stream, as bits."""
    step_users: int
    slot_bytes: int
    spared_ps: int
    """What the sums leave out of a decode step's reading, because the ring keeps it."""
    lacking: int
    """Bytes that the other rules must take, the ring left out."""
    room: float
    """What they may cost."""
    room_beyond: float
    times: Times


@dataclass
class _Scan:
    found: Combinations
    combined: Combination
    context: Context
    goal: Goal
    limit: Time

    def __post_init__(self) -> None:
        self.options = [self.found.options[number] for number in self.combined.options]
        self.reads_ps = [
            option.reads_ps(self.found.problem.kind_of) if streams(backends) else None
            for option, backends in zip(self.options, self.combined.backends, strict=True)
        ]

    def candidates(self, relaxed: Sequence[tuple[Filled, Weighing]]) -> list[Candidate]:
        """List plans: by the weighing whose bound is nearest to what is wanted."""
        cuts, context = self.goal.cuts(self.limit), self.context

        def nearness(each: tuple[Filled, Weighing]) -> float:
            most_ps = cuts[each[1].cut].most_ps
            return float(each[0].least / most_ps) if most_ps else NEVER

        filled, weighing = max(relaxed, key=nearness)
        self.rates, levels = weighing.rates, self._levels(weighing, filled.rate)
        backends = self.combined.backends
        needed, spared_ps = self.found.needed(self.options, backends, context)
        # the starts of what the ring spares are counted as well
        starts_ps = context.num_slots * context.start_ps
        step_starts_ps = starts_ps if context.turn is Turn.TURNS else 0
        room = cuts[weighing.cut].most_ps - weighing.fixed_ps
        room += self.rates.prompt_copy * starts_ps + self.rates.step_copy * step_starts_ps
        beyond = room + self.rates.prompt_copy * spared_ps - filled.rate * needed
        lacking = context.lacking_bytes
        times = (-starts_ps, 0, -step_starts_ps, 0)
        found: list[Candidate] = []
        self._extend(
            levels, _Prefix((), (), 0, 0, 0, 0, lacking, float(room), float(beyond), times), found
        )
        return found

    def _levels(self, weighing: Weighing, price: float) -> list[_Level]:
        context, backends = self.context, self.combined.backends
        turns = in_turns(backends, context)
        # by rule, those before it; None for one that does not stream
        streamed = tuple(
            number if streams(each) else None
            for number, each in zip(self.combined.options, backends, strict=True)
        )
        found: list[_Level] = []
        most, cost, excess = 0, 0.0, 0.0
        times: Times = (0, 0, 0, 0)
        for rule in reversed(range(len(self.options))):
            option, each = self.options[rule], backends[rule]
            number = self.combined.options[rule]
            column = context.column(number, option, each, turns[rule], weighing, price)
            prompt_ps, step_ps = self._layers_ps(rule, turns[rule])
            slots = self.found.shared_slots(streamed[:rule], number) if streams(each) else []
            spared = column.spared_ps if context.turn is Turn.KEEPS and streams(each) else []
            found.append(
                _Level(
                    column,
                    option.layers,
                    slots,
                    prompt_ps,
                    step_ps,
                    spared,
                    most,
                    cost,
                    excess,
                    times,
                )
            )
            most += column.sizes[-1]
            cost += column.least_costs[0]
            excess += column.least_excess
            times = _add(times, column.least_times[0])
        return found[::-1]

    def _layers_ps(
        self, rule: int, turns: Turns
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What a layer that streams takes of the link beside its bytes: rules may share it."""
        problem, context = self.found.problem, self.context
        priced = problem.settings[self.combined.setting].prefill, problem.decode
        counted = (True, context.turn is Turn.TURNS)
        found: list[list[tuple[int, int]]] = [[], []]
        for phase, backend in enumerate(self.combined.backends[rule]):
            if backend is not Backend.PREFETCH or not counted[phase]:
                continue
            # with one slot, layers that stream compute in turns with the link
            alternates = context.num_slots == 1 and context.turn is not Turn.KEEPS
            for layers in problem.layers_of_kind:
                layer_ps = priced[phase].layer_ps[(layers & -layers).bit_length() - 1]
                own_ps = layer_ps if alternates and not turns[phase] else 0
                found[phase].append((layers, context.start_ps + own_ps))
        return found[0], found[1]

    def _extend(self, levels: Sequence[_Level], prefix: _Prefix, found: list[Candidate]) -> None:
        """Choose groups of the rules that have none yet, within what is left of each sum."""
        level, *others = levels
        column, num_slots, rates = level.column, self.context.num_slots, self.rates
        costs, excesses, sizes = column.costs, column.excesses, column.sizes
        groups, lacking, times, slot_bytes = (
            prefix.groups,
            prefix.lacking,
            prefix.times,
            prefix.slot_bytes,
        )
        needed = lacking + num_slots * slot_bytes - level.most_after
        start = bisect_left(sizes, needed)
        room, beyond = prefix.room - level.cost_after, prefix.room_beyond - level.excess_after
        if start == len(sizes) or column.least_costs[start] >= room:
            return
        slots = self._larger_slots(level, prefix)
        least_times = _add(times, level.times_after)
        for number in range(start, len(sizes)):
            if column.least_costs[number] >= room:
                break
            cost, excess = costs[number], excesses[number]
            if cost >= room or excess >= beyond:
                continue
            layers, size = level.layers[number], sizes[number]
            slot = slot_bytes
            for larger, among in slots:
                if layers & among:
                    slot = larger
                    break
            if size < lacking + num_slots * slot - level.most_after:
                continue
            prompt_ps = step_ps = 0
            for among, layer_ps in level.prompt_ps:
                prompt_ps += (layers & among & ~prefix.prompt_users).bit_count() * layer_ps
            for among, layer_ps in level.step_ps:
                step_ps += (layers & among & ~prefix.step_users).bit_count() * layer_ps
            spared_ps = read_ps = 0
            if level.spared_ps:
                most_ps = prefix.spared_ps + level.spared_ps[number]
                spared_ps = min(most_ps, self._kept_ps((*prefix.layers, layers)))
                read_ps = most_ps - spared_ps
            shared = rates.prompt_copy * prompt_ps + rates.step_copy * step_ps
            # what lies beyond the bytes' price counts a slot's bytes once for all that it spares
            excess += shared
            cost += shared + rates.step_read * read_ps
            if cost >= room or excess >= beyond:
                continue
            a, b, c, d = column.times[number]
            more = (a + prompt_ps, b, c + step_ps, d + read_ps)
            if self._exceeds(least_times, more):
                if self._exceeds(least_times, column.least_times[number]):
                    break
                continue
            if not others:
                candidate = self._bound((*groups, number))
                if candidate is not None:
                    found.append(candidate)
                continue
            extended = _Prefix(
                (*groups, number),
                (*prefix.layers, layers),
                prefix.prompt_users | (layers if level.prompt_ps else 0),
                prefix.step_users | (layers if level.step_ps else 0),
                slot,
                spared_ps if level.spared_ps else prefix.spared_ps,
                lacking - size,
                prefix.room - cost,
                prefix.room_beyond - excess,
                _add(times, more),
            )
            self._extend(others, extended, found)

    def _kept_ps(self, layers: Sequence[int]) -> int:
        """What decode finds in the ring, where these are the layers of the first rules.

        The last that stream; rules that follow can only leave less of these.
        """
        streamed = [
            (bits, reads)
            for bits, reads in zip(layers, self.reads_ps, strict=False)
            if reads is not None
        ]
        users = kept_ps = 0
        for bits, _ in streamed:
            users |= bits
        for _ in range(self.context.num_slots):
            if not users:
                break
            last = users.bit_length() - 1
            users ^= 1 << last
            for bits, reads in streamed:
                if bits >> last & 1:
                    kept_ps += reads[last]
        return kept_ps

    @staticmethod
    def _larger_slots(level: _Level, prefix: _Prefix) -> list[tuple[int, int]]:
        """Layers that make slots larger than a prefix needs, if a rule streams one of them too."""
        found = []
        for slot_bytes, among, rules in level.slots:
            if slot_bytes <= prefix.slot_bytes:
                break
            for rule in rules:
                among &= prefix.layers[rule]
            if among:
                found.append((slot_bytes, among))
        return found

    def _exceeds(self, times: Times, more: Times) -> bool:
        """Whether no plan of this time, or a longer one, is better."""
        prompt, step = self.context.frames
        prefill_ps = prompt.least_ps(times[0] + more[0], times[1] + more[1])
        decode_ps = step.least_ps(times[2] + more[2], times[3] + more[3])
        return self.goal.value(prefill_ps, decode_ps) >= self.limit

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
