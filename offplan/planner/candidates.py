"""The plans of one combination: group by group, those that may be better than a given value."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offplan.plan import Backend
from offplan.planner.combinations import TURNS, Candidate, Combination, Combinations
from offplan.planner.context import Context, Times
from offplan.planner.levels import Level, add, list_levels
from offplan.planner.options import Rates, users_of
from offplan.planner.problem import KindCosts
from offplan.planner.relaxation import Filled, Turn, Weighing
from offplan.planner.slots import kept_ps
from offplan.planner.targets import NEVER, Goal, Time


def list_candidates(
    found: Combinations, combined: Combination, goal: Goal, limit: Time
) -> list[Candidate]:
    """List a combination's plans that may be better than ``limit``."""
    turn, num_slots, cuts = TURNS[combined.turn], combined.num_slots, goal.cuts(limit)
    context = found.context((combined.setting,), num_slots, turn, goal)
    by_byte = context
    if turn is Turn.KEEPS:  # one ring is as good as another
        by_byte = found.context((combined.setting,), min(1, num_slots), turn, goal)
    relaxed = by_byte.relax(combined.options, combined.backends, cuts)
    if relaxed is None:
        return []

    def nearness(each: tuple[Filled, Weighing]) -> float:
        most_ps = cuts[each[1].cut].most_ps
        return float(each[0].least / most_ps) if most_ps else NEVER

    # by the weighing whose bound is nearest to what is wanted
    filled, weighing = max(relaxed, key=nearness)
    levels = list_levels(found, combined, context, weighing, filled.rate)
    host_room = found.problem.host_room(found.problem.settings[combined.setting])
    scan = _Scan(found, combined, context, goal, limit, weighing.rates, levels, host_room)
    room = float(cuts[weighing.cut].most_ps - weighing.fixed_ps)
    scan.extend(scan.start(room, filled.rate))
    return scan.listed


class _Prefix(NamedTuple):
    """Groups of the first rules, and what is left for the others."""

    groups: tuple[int, ...]
    streamed: tuple[tuple[int, Sequence[KindCosts]], ...]
    """Layers that each rule streams, as bits, and its costs of each kind of layer."""
    users: tuple[int, int]
    """Layers that stream in a prompt, and in a decode step, as bits."""
    slot_bytes: int
    """That the largest slot holds."""
    spared_ps: int
    """What the sums leave out of a decode step's reading, because the ring keeps it."""
    lacking: int
    """Bytes that the other rules must take, the ring left out."""
    room: float
    """What they may cost less than."""
    room_beyond: float
    """And beyond their bytes' price."""
    times: Times


@dataclass
class _Scan:
    found: Combinations
    combined: Combination
    context: Context
    goal: Goal
    limit: Time
    rates: Rates
    """Weights of each kind of time in what groups cost."""
    levels: Sequence[Level]
    """Of each rule."""
    host_room: int | None
    """Bytes that the store has room for."""
    listed: list[Candidate] = field(default_factory=list)

    def start(self, room: float, price: float) -> _Prefix:
        """Choose no group yet; a byte of memory has this price."""
        context, combined, rates = self.context, self.combined, self.rates
        needed, spared_ps = context.needed(combined.options, combined.backends)
        # the starts of what the ring spares are counted with those of all copies
        starts_ps = context.num_slots * context.start_ps
        step_starts_ps = starts_ps if context.turn is Turn.TURNS else 0
        room += rates.prompt_copy * starts_ps + rates.step_copy * step_starts_ps
        return _Prefix(
            groups=(),
            streamed=(),
            users=(0, 0),
            slot_bytes=0,
            spared_ps=0,
            lacking=context.lacking_bytes,
            room=room,
            room_beyond=room + rates.prompt_copy * spared_ps - price * needed,
            times=(-starts_ps, 0, -step_starts_ps, 0),
        )

    def extend(self, prefix: _Prefix) -> None:
        """Choose groups of the rules that have none yet, within what is left of each sum."""
        level = self.levels[len(prefix.groups)]
        is_last = level is self.levels[-1]
        column, num_slots = level.column, self.context.num_slots
        costs, least_costs, excesses = column.costs, column.least_costs, column.excesses
        lacking = prefix.lacking - level.most_after
        room, beyond = prefix.room - level.cost_after, prefix.room_beyond - level.excess_after
        start = bisect_left(column.sizes, lacking + num_slots * prefix.slot_bytes)
        stop = len(column.sizes)
        if self.host_room is not None:
            taken = self.context.lacking_bytes - prefix.lacking
            stop = bisect_right(column.sizes, self.host_room - taken - level.least_after)
        larger = None
        for number in range(start, stop):
            if least_costs[number] >= room:
                break
            if costs[number] >= room or excesses[number] >= beyond:
                continue
            if larger is None:
                streamed = [layers for layers, _ in prefix.streamed]
                larger = level.larger_slots(streamed, prefix.slot_bytes)
            slot_bytes = prefix.slot_bytes
            for num_bytes, layers in larger:
                if layers & level.option.layers[number]:
                    slot_bytes = num_bytes
                    break
            if column.sizes[number] < lacking + num_slots * slot_bytes:
                continue
            extended = self._choose(level, prefix, number, slot_bytes)
            if extended.room <= level.cost_after or extended.room_beyond <= level.excess_after:
                continue
            if self._exceeds(extended.times, level.times_after):
                if self._exceeds(add(prefix.times, level.times_after), column.least_times[number]):
                    break
            elif is_last:
                self._list(extended.groups)
            else:
                self.extend(extended)

    def _choose(self, level: Level, prefix: _Prefix, number: int, slot_bytes: int) -> _Prefix:
        """Choose a group of the next rule: what it takes beside its column's figures is shared."""
        column, rates, layers = level.column, self.rates, level.option.layers[number]
        beside_ps, users = [0, 0], list(prefix.users)
        for phase, each in enumerate(level.beside):
            for among, layer_ps in each:
                new = layers & among & ~prefix.users[phase]
                beside_ps[phase] += new.bit_count() * layer_ps
            if each:
                users[phase] |= layers
        streamed = (*prefix.streamed, (layers if level.streams else 0, level.option.costs))
        spared_ps, read_ps = prefix.spared_ps, 0
        if level.spared_ps:
            most_ps = spared_ps + level.spared_ps[number]
            kind_of = self.found.problem.kind_of
            spared_ps = min(most_ps, kept_ps(streamed, kind_of, self.context.num_slots))
            read_ps = most_ps - spared_ps
        shared = rates.prompt_copy * beside_ps[0] + rates.step_copy * beside_ps[1]
        copies_ps = beside_ps[0], 0, beside_ps[1], read_ps
        return _Prefix(
            groups=(*prefix.groups, number),
            streamed=streamed,
            users=(users[0], users[1]),
            slot_bytes=slot_bytes,
            spared_ps=spared_ps,
            lacking=prefix.lacking - column.sizes[number],
            room=prefix.room - column.costs[number] - shared - rates.step_read * read_ps,
            # there a slot's bytes are counted once for all that it spares
            room_beyond=prefix.room_beyond - column.excesses[number] - shared,
            times=add(prefix.times, add(column.times[number], copies_ps)),
        )

    def _exceeds(self, times: Times, more: Times) -> bool:
        """Whether no plan of this time, or a longer one, is better."""
        prompt, step = self.context.frames
        prefill_ps = prompt.least_ps(times[0] + more[0], times[1] + more[1])
        decode_ps = step.least_ps(times[2] + more[2], times[3] + more[3])
        return self.goal.value(prefill_ps, decode_ps) >= self.limit

    def _list(self, groups: tuple[int, ...]) -> None:
        """List a plan, if it may be better by a bound of its own."""
        taken = [level.taken[group] for level, group in zip(self.levels, groups, strict=True)]
        if self.context.num_slots and self.context.turn is not Turn.KEEPS:
            step = users_of([rule for rule in taken if rule.backends[1] is Backend.PREFETCH])
            turns = step.bit_count() > self.context.num_slots
            if turns is not (self.context.turn is Turn.TURNS):
                return
        where = self.combined.num_slots, self.combined.setting
        times = self.found.passes.least_ps(taken, *where, self.goal, self.limit)
        if times is None:
            return
        longest, decode_ps = times
        for rule in taken:
            longest = max(longest, self.found.passes.alone_ps(rule, *where))
        bound = self.goal.value(longest, decode_ps)
        if bound < self.limit:
            self.listed.append(Candidate(max(bound, self.combined.bound), decode_ps, groups))
