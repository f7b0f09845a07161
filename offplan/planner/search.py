"""Best-first search: candidates in the order of their bounds, until no bound is better.

For each first rule, the smallest completions by a second one: of the rules of another option, those
that take what the first one leaves, by a bound that adds up. What remains is priced exactly, many
candidates at once. Exact: what is passed over has a bound no better than what was found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.costs.predict import predict
from offplan.costs.work import makes_values
from offplan.held.held import Held
from offplan.held.packing import pack_everything, packable
from offplan.plan import Budget, Offload, Rule
from offplan.planner.aims import NEVER, Aim, Floats
from offplan.planner.bounds import Loads, Rules, bound_times, cross, list_rules
from offplan.planner.in_place import InPlaceRules
from offplan.planner.limits import check_range
from offplan.planner.patterns import list_patterns
from offplan.planner.prices import NO_RULE, Candidates, Ints, Prices
from offplan.planner.space import PREFETCH_STEPS, Room, Space
from offplan.planner.stages import Stages

MAX_RULES = 2
"""Rules of a plan, at most."""
ROUNDING = 1e-12
"""Values that differ by less of themselves are compared exactly."""
BLOCK = 1024
"""Candidates priced together: enough to make an array's own cost a small share."""


Rank = tuple[object, ...]
"""What decides between equally good plans: the least rank is chosen."""


class Found(NamedTuple):
    """A plan and how good it is; of equally good ones that of the least rank is chosen."""

    value: Fraction
    rank: Rank
    """Rules, bytes that cross at least, slots, setting and what the rules take; less is first."""
    offload: Offload


@dataclass
class Search:
    """What was found, and among how many."""

    best: Found | None = None
    single: Found | None = None
    """The best plan of at most one rule; None where none is wanted."""
    num_candidates: int = 0
    """Plans of at most one rule that fit the budget."""
    num_priced: int = 0
    """Plans whose timeline was run."""
    gpu_lack: float = NEVER
    """Bytes of GPU memory that the plan of at most one rule lacks that is nearest to fitting."""
    host_lack: float = NEVER
    """Bytes of the store that those lack that fit the GPU; 0 once one fits."""

    @property
    def second_rule_gain(self) -> float:
        """The value of the best plan of at most one rule over that of the best plan."""
        if self.best is None or self.single is None or not self.best.value:
            return 1.0
        return float(self.single.value / self.best.value)


@dataclass
class Searcher:
    """Searches one space, for any budget and aim."""

    space: Space

    def __post_init__(self) -> None:
        check_range(self.space)

    @cached_property
    def packed(self) -> "Searcher | None":
        """Searches the same question with all packed that can be; None where nothing may be."""
        question = self.space.question
        if not question.may_pack or not packable(question.model, question.unpacked):
            return None
        # values of a head are made for many sequences, and take more than packing it saves
        head = not makes_values(question.workload.batch, question.model.element_bytes)
        packing = pack_everything(question.model, head=head, unpacked=question.unpacked)
        return Searcher(Space(question, packing))

    @property
    def spaces(self) -> list[Space]:
        """All that are searched: this one, and that with all packed."""
        return [self.space, *([] if self.packed is None else [self.packed.space])]

    def hold(self, offload: Offload) -> Held:
        """Return what the ranks hold by a plan that was found, maybe with only some layers packed.

        What a space holds already is not packed again.
        """
        for space in self.spaces:
            if space.packing == offload.packing:
                return space.held
        return self.space.question.held.pack(offload.packing)

    @cached_property
    def prices(self) -> Prices:
        """Exact memory and times."""
        return Prices(self.space)

    @cached_property
    def rules(self) -> Rules:
        """The rules that plans may have."""
        return list_rules(self.space, self.prices)

    @cached_property
    def stages(self) -> Stages | None:
        """The other stages of a pipeline, whose times add up; None where there is one."""
        if self.space.question.goal.pipeline_parallel == 1:
            return None
        return Stages(self.space, self.rules)

    @cached_property
    def in_place(self) -> InPlaceRules:
        """Plans that copy nothing."""
        return InPlaceRules(self.space)

    @cached_property
    def disjoint(self) -> NDArray[np.bool_]:
        """Whether two options have no parameter in common, [options, options]."""
        taken = [self.space.taken[option.segment_class] for option in self.space.options]
        held = [{id(unit) for units in kinds for unit in units} for kinds in taken]
        return np.array([[one.isdisjoint(other) for other in held] for one in held])

    @cached_property
    def can_export(self) -> Callable[[Offload, Budget], bool]:
        """Whether the runner can run a plan, and what it takes fits."""
        question = self.space.question
        check = self.space.runner.checker(question.held)
        if check is None:
            return lambda _, __: True

        def fits(offload: Offload, budget: Budget) -> bool:
            demand, host = check(offload), budget.host_memory
            if demand is None or (host is not None and demand.pinned_bytes > host):
                return False
            if demand.more_gpu_bytes <= 0 and question.goal.pipeline_parallel == 1 and host is None:
                return True
            taken = predict(question.held, self.space.machine, question.workload, budget, offload)
            fits_host = host is None or taken.host_memory_bytes <= host
            more = max(0, demand.more_gpu_bytes)
            return fits_host and taken.gpu_memory.total_bytes + more <= budget.gpu_memory

        return fits

    def find(
        self, room: Room, aim: Aim, limit: float = NEVER, max_rules: int = MAX_RULES
    ) -> Search:
        """Find the best plan of a value below ``limit``; of equally good ones one of fewest rules.

        None is found where no plan of up to ``max_rules`` fits, or is wanted.
        """
        run = _Run(self, room, aim, limit)
        run.try_in_place()
        run.try_singles()
        run.search.single = run.search.best
        if not self.space.runner.takes_one_rule and max_rules > 1:
            run.try_pairs()
        return run.search


class _Rows(NamedTuple):
    """Rules that may be a plan alone or with a second one: arrays of an entry for each."""

    bound: Floats
    link_bytes: Floats
    setting: Ints
    num_slots: Ints
    first: Ints
    """The rule, by number."""
    second: Ints
    """The smallest second rule of its option that completes it; NO_RULE alone."""

    def choose(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "_Rows":
        """Keep some of the rows."""
        columns: Any = (column[rows] for column in self)
        return _Rows(*columns)


def _join(rows: Sequence[_Rows]) -> _Rows:
    columns: Any = map(np.concatenate, zip(*rows, strict=True))
    return _Rows(*columns)


class _Run:
    """One search: a room, an aim, and the best so far."""

    def __init__(self, searcher: Searcher, room: Room, aim: Aim, limit: float) -> None:
        self.searcher, self.room, self.aim, self.limit = searcher, room, aim, limit
        self.space, self.prices, self.rules = searcher.space, searcher.prices, searcher.rules
        self.stages, self.search = searcher.stages, Search()

    def try_in_place(self) -> None:
        """Try the plans that copy nothing."""
        for each in self.searcher.in_place.plans(self.room):
            if not self._note(np.array([each.gpu_lack]), np.array([each.host_lack]))[0]:
                continue
            self.search.num_candidates += 1
            write = partial(self._offload, each.setting, 1, each.rules)
            prompt_ps, step_ps = each.times_ps[0], Fraction(each.times_ps[1])
            if self.stages is not None:
                more = self.stages.price_offload(write(), each.setting)
                if more is None:
                    continue
                prompt_ps, step_ps = prompt_ps + more[0], step_ps + more[1]
            value = self.aim.values(*np.array([prompt_ps, step_ps], float).reshape(2, 1))[0]
            if value <= self._most and value < NEVER:
                rank = (len(each.rules), each.link_bytes, 1, each.setting, *each.rank)
                self._offer(self.aim.exact(prompt_ps, step_ps), rank, write)

    def try_singles(self) -> None:
        """Try the plans of one rule."""
        rules, rows = self.rules, self._single_rows()
        order = np.lexsort(
            (
                [rules.patterns[rule][0] for rule in rows.first],
                rules.option[rows.first],
                rows.setting,
                np.maximum(rows.num_slots, 1),
                rows.link_bytes,
                rows.bound,
            )
        )
        for block in self._blocks(rows.choose(order), 16):
            best = self.search.best
            as_good = best is not None and block.bound[0] >= float(best.value)
            if best is not None and as_good and self._rank(block, 0) > best.rank:
                return
            self._try_patterns(block)

    def _single_rows(self) -> _Rows:
        """List the rules that fit alone, in each setting and with each ring."""
        rules, space = self.rules, self.space
        turns = rules.times.columns.prompt_turns
        found = []
        for num_slots in (0, *PREFETCH_STEPS):
            # with as many slots as layers every layer would own one: resident in all but name
            chosen = np.flatnonzero((turns > num_slots) if num_slots else (turns == 0))
            first, setting = (
                each.ravel() for each in np.meshgrid(chosen, np.arange(len(space.settings)))
            )
            slots = np.full(len(first), num_slots)
            loads = rules.times.at(first, setting)
            off_gpu = loads.unit_bytes - num_slots * loads.slot_bytes
            fits = self._note(
                self.room.lacking_bytes[setting] + space.kept_by[rules.option[first]] - off_gpu,
                loads.slab_bytes - self.room.host_bytes[setting],
            )
            self.search.num_candidates += sum(len(rules.patterns[rule]) for rule in first[fits])
            first, setting, slots = first[fits], setting[fits], slots[fits]
            loads = Loads(*(column[fits] for column in loads))
            times = bound_times(space, [loads], setting, slots)
            if self.stages is not None:
                more = self.stages.bound(first, setting, slots)
                times = times[0] + more[0], times[1] + more[1]
            traffic = cross([rules.traffic.at(first, setting)], slots, 0)
            rows = space.table.row_bytes[setting]
            link_bytes = [
                traffic.prompt_copied + traffic.prompt_read + rows[:, 0],
                traffic.step_copied + traffic.step_read + rows[:, 1],
            ]
            weighed = np.dot(space.weights, link_bytes)
            alone = np.full(len(first), NO_RULE)
            found.append(_Rows(self.aim.values(*times), weighed, setting, slots, first, alone))
        joined = _join(found)
        return joined.choose(joined.bound < NEVER)

    def _rank(self, rows: _Rows, row: int) -> Rank:
        """Return the rank of a row's first pattern."""
        option = self.space.options[self.rules.option[rows.first[row]]]
        slots = max(1, int(rows.num_slots[row]))
        where = 1, int(rows.link_bytes[row]), slots, int(rows.setting[row])
        return (*where, *option.rank, 0, self.rules.patterns[rows.first[row]][0])

    def _try_patterns(self, rows: _Rows) -> None:
        """Try each row's rule with every pattern that costs the same memory."""
        patterns = [self.rules.patterns[rule] for rule in rows.first]
        row = np.repeat(np.arange(len(patterns)), [len(each) for each in patterns])
        numbers = np.concatenate([np.array(each) for each in patterns])
        candidates = Candidates(
            rows.setting[row],
            rows.num_slots[row],
            self.rules.option[rows.first[row]],
            numbers,
            rows.second[row],
            rows.second[row],
        )

        def rank(number: int) -> Rank:
            return (*self._rank(rows, row[number])[:-1], int(numbers[number]))

        self._try(candidates, np.zeros(len(row)), rank)

    def try_pairs(self) -> None:
        """Try the plans of two rules, if they may be better than the best so far."""
        rows = self._pair_rows()
        for block in self._blocks(rows.choose(np.argsort(rows.bound, kind="stable")), 4):
            if block.bound[0] < self._most:
                self._try_completions(block)

    def _blocks(self, rows: _Rows, size: int) -> Iterator[_Rows]:
        """Yield rows, sorted by bound, in growing blocks, until none may be as good as the best."""
        start = 0
        while start < len(rows.bound) and rows.bound[start] <= self._most:
            yield rows.choose(np.arange(start, min(start + size, len(rows.bound))))
            start, size = start + size, min(2 * size, BLOCK)

    def _pair_rows(self) -> _Rows:
        """List the rules that a second one may complete, once for each option that does."""
        rules, space, room = self.rules, self.space, self.room
        resident = (space.table.resident_ps + space.table.row_ps).astype(float)
        settings = np.flatnonzero(
            (self.aim.values(*resident.T) < self._most)
            & (np.maximum(0, room.lacking_bytes) <= room.host_bytes)
        )
        columns = rules.times.columns
        streams = columns.prompt_turns > 0
        found = [_Rows(*(np.zeros(0, dtype) for dtype in (float, float, int, int, int, int)))]
        for num_slots in (0, *PREFETCH_STEPS):
            every = np.flatnonzero(~streams) if num_slots == 0 else np.arange(len(streams))
            firsts, where = (each.ravel() for each in np.meshgrid(every, settings))
            loads = rules.times.at(firsts, where)
            alone = bound_times(space, [loads], where, np.full(len(where), num_slots), more=True)
            alive = self.aim.values(*alone) < self._most
            firsts, where = firsts[alive], where[alive]
            for option, (begin, end) in enumerate(zip(rules.starts, rules.ends, strict=True)):
                if streams[begin] and not num_slots:
                    continue
                partners = self.searcher.disjoint[option] & (np.arange(len(rules.starts)) < option)
                wanted = partners[rules.option[firsts]]
                if num_slots and not streams[begin]:
                    wanted &= streams[firsts]
                first, setting = firsts[wanted], where[wanted]
                loads = rules.times.at(first, setting)
                slot = np.maximum(loads.slot_bytes, columns.slot_bytes[begin:end].min())
                needed = room.lacking_bytes[setting] + num_slots * slot - loads.unit_bytes
                second = begin + np.searchsorted(columns.unit_bytes[begin:end], needed)
                enough = second < end
                if not enough.any():
                    continue
                first, setting, second = first[enough], setting[enough], second[enough]
                loads = Loads(*(column[enough] for column in loads))
                slots = np.full(len(first), num_slots)
                both = [loads, rules.least_times.at(second, setting)]
                bound = self.aim.values(*bound_times(space, both, setting, slots))
                on_host = sum(each.slab_bytes for each in both) <= room.host_bytes[setting]
                rows = _Rows(bound, bound, setting, slots, first, second)
                found.append(rows.choose((bound < self._most) & on_host))
        return _join(found)

    def _try_completions(self, rows: _Rows) -> None:
        """Try each row's rule with every second one of its option that may do."""
        rules, room = self.rules, self.room
        counts = rules.ends[rules.option[rows.second]] - rows.second
        row = np.repeat(np.arange(len(counts)), counts)
        second = (rows.second - np.cumsum(counts) + counts)[row] + np.arange(len(row))
        setting, slots, first = rows.setting[row], rows.num_slots[row], rows.first[row]
        both = [rules.times.at(each, setting) for each in (first, second)]
        ring = slots * np.maximum(*(each.slot_bytes for each in both))
        fits = sum(each.unit_bytes for each in both) - ring >= room.lacking_bytes[setting]
        fits &= sum(each.slab_bytes for each in both) <= room.host_bytes[setting]
        times = bound_times(self.space, both, setting, slots)
        bound = self.aim.values(*times)
        chosen = np.flatnonzero(fits & (bound < self._most))
        chosen = chosen[np.argsort(bound[chosen], kind="stable")]
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            block = block[bound[block] < self._most]
            if not len(block):
                return
            candidates = Candidates(
                setting[block],
                slots[block],
                rules.option[first[block]],
                rules.first_pattern[first[block]],
                rules.option[second[block]],
                rules.first_pattern[second[block]],
            )
            off_gpu, on_host, num_turns = self.prices.weigh(candidates)
            keeps = off_gpu >= room.lacking_bytes[candidates.setting]
            keeps &= on_host <= room.host_bytes[candidates.setting]
            keeps &= (num_turns > candidates.prefetch_step) | (candidates.prefetch_step == 0)
            kept = candidates.choose(np.flatnonzero(keeps))

            def rank(number: int, kept: Candidates = kept) -> Rank:
                return (2, *(int(column[number]) for column in kept))

            self._try(kept, times[1][block[keeps]], rank)

    def _try(self, candidates: Candidates, step_ps: Floats, rank_of: Callable[[int], Rank]) -> None:
        """Price candidates whose decode step takes at least ``step_ps``, and keep the best."""
        if not len(step_ps):
            return
        self.search.num_priced += len(step_ps)
        rows, prompt_ps, over, under = self.prices.price(
            candidates, lambda prompt_ps: self.aim.values(prompt_ps, step_ps) <= self._most
        )
        elsewhere: list[Fraction] = []
        if self.stages is not None:
            chosen = candidates.choose(rows)
            taken, (_, on_host, _) = self.stages.price(chosen), self.prices.weigh(chosen)
            fits = on_host + taken.host_bytes <= self.room.host_bytes[chosen.setting]
            kept = np.flatnonzero(taken.has_same_flags & fits)
            rows, over, under = rows[kept], over[kept], under[kept]
            prompt_ps = prompt_ps[kept] + taken.prompt_ps[kept]
            elsewhere = [taken.step_ps[number] for number in kept.tolist()]
        more_ps = np.array([float(each) for each in elsewhere]) if elsewhere else 0.0
        values = self.aim.values(prompt_ps.astype(float), over / under + more_ps)
        for number in np.argsort(values, kind="stable"):
            if values[number] > self._most * (1 + ROUNDING) or values[number] == NEVER:
                return
            step = Fraction(int(over[number]), int(under[number]))
            step += elsewhere[number] if elsewhere else 0
            value, rank = self.aim.exact(int(prompt_ps[number]), step), rank_of(rows[number])
            self._offer(value, rank, partial(self._offload_of, candidates, rows[number]))

    def _offload_of(self, candidates: Candidates, number: int) -> Offload:
        setting, num_slots, *taken = (int(column[number]) for column in candidates)
        patterns = list_patterns(len(self.space.kind_of))
        rules = tuple(
            self.space.options[option].rule(
                int(patterns.group_size[pattern]), int(patterns.num_in_group[pattern])
            )
            for option, pattern in sorted((taken[:2], taken[2:]), key=self._most_bytes)
            if option != NO_RULE
        )
        return self._offload(setting, num_slots, rules)

    def _most_bytes(self, taken: list[int]) -> float:
        """Sort rules by what their classes hold, the most first."""
        return -float(self.rules.times.columns.unit_bytes[self.rules.ends[taken[0]] - 1])

    def _offload(self, setting: int, num_slots: int, rules: tuple[Rule, ...]) -> Offload:
        chosen = self.space.settings[setting]
        return Offload(
            prefetch_step=max(1, num_slots),
            prefill_chunk=chosen.prefill_chunk,
            embeddings=chosen.embeddings,
            store=self.space.machine.store,
            packing=self.space.packing,
            rules=rules,
        )

    @property
    def _most(self) -> float:
        """No plan of a larger value is wanted, nor one of two rules of an equal one."""
        best = self.search.best
        return self.limit if best is None else float(best.value)

    def _offer(self, value: Fraction, rank: Rank, write: Callable[[], Offload]) -> None:
        """Keep a plan if it is the best so far, and an engine can say it."""
        best = self.search.best
        if value < self.limit and (best is None or (value, rank) < best[:2]):
            offload = write()
            if self.searcher.can_export(offload, self.room.budget):
                self.search.best = Found(value, rank, offload)

    def _note(self, gpu_lacks: Floats, host_lacks: Floats) -> NDArray[np.bool_]:
        """Take note of what plans lack (negative: have to spare); returns which of them fit."""
        search, fits = self.search, gpu_lacks <= 0
        search.gpu_lack = min(search.gpu_lack, max(0.0, gpu_lacks.min(initial=NEVER)))
        search.host_lack = min(search.host_lack, max(0.0, host_lacks[fits].min(initial=NEVER)))
        return fits & (host_lacks <= 0)
