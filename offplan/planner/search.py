"""The search of one space: rules that are a plan alone, then every pair of two that may be better.

Plans of one rule are priced in the order of their estimates, as long as an estimate is better than
the best plan so far. A first rule is kept if its estimate is better than that plan. An option of
second rules is kept for it if the smallest one that frees what is missing makes an estimate that is
better still. Then each rule of the option is tried, best estimates first.

Estimates are low, so what is passed over is hardly ever better: more memory or a faster link, which
only add plans or make them faster, do not make the best plan found slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.costs.predict import predict
from offplan.costs.work import makes_values
from offplan.held.held import Held
from offplan.held.packing import pack_everything, packable
from offplan.held.runner import Demand
from offplan.plan import Budget, Offload, Packing, Rule
from offplan.planner.aims import NEVER, Aim
from offplan.planner.estimates import Rules, estimate, list_rules
from offplan.planner.firsts import Firsts, Rows, list_firsts
from offplan.planner.in_place import InPlaceRules
from offplan.planner.limits import check_range
from offplan.planner.patterns import choose, list_patterns
from offplan.planner.prices import NO_RULE, Candidates, Ints, Prices
from offplan.planner.space import Room, Space, find_room
from offplan.planner.stages import Stages

MAX_RULES = 2
"""Rules of a plan, at most."""
BLOCK = 1024
"""Candidates priced together: enough to make an array's own cost a small share."""


class Found(NamedTuple):
    """A plan and how good it is."""

    value: float
    """As the search's aim weighs it."""
    rank: tuple[int, ...]
    """How plain it is among equally good ones: rules, host bytes, segments, slots, groups."""
    times_ps: tuple[float, float]
    """Picoseconds of the prompt, and of a decode step."""
    write: Callable[[], Offload]

    @property
    def offload(self) -> Offload:
        """The plan's decision."""
        return self.write()


@dataclass
class Search:
    """What was found, and among how many."""

    best: Found | None = None
    single: float = NEVER
    """The value of the best plan of at most one rule; NEVER where none is wanted."""
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
        if self.best is None or self.single == NEVER or not self.best.value:
            return 1.0
        return self.single / self.best.value


@dataclass
class Searcher:
    """Searches one space, for any budget and aim."""

    space: Space
    _firsts: tuple[Budget, Firsts] | None = None

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
        return Stages(self.space)

    @cached_property
    def in_place(self) -> InPlaceRules:
        """Plans that copy nothing."""
        return InPlaceRules(self.prices)

    def firsts(self, budget: Budget) -> Firsts:
        """List what a budget leaves of the rules; the last list is kept for the next aim."""
        if self._firsts is None or self._firsts[0] != budget:
            room = find_room(self.space, budget)
            self._firsts = budget, list_firsts(self.prices, self.rules, self.in_place, room)
        return self._firsts[1]

    @cached_property
    def disjoint(self) -> NDArray[np.bool_]:
        """Whether two options have no parameter in common, [options, options]."""
        taken = [self.space.taken(option.segment_class) for option in self.space.options]
        held = [{id(unit) for units in kinds for unit in units} for kinds in taken]
        return np.array([[one.isdisjoint(other) for other in held] for one in held])

    @cached_property
    def can_export(self) -> Callable[[Offload, Budget], bool]:
        """Whether the runner can run a plan, and what it takes fits."""
        question = self.space.question
        if self.space.runner.checker(question.held) is None:
            return lambda _, __: True

        @cache
        def check_by(packing: Packing | None) -> tuple[Held, Callable[[Offload], Demand | None]]:
            # a rival may be of another packing
            is_own = packing == self.space.packing
            held = self.space.held if is_own else question.held.pack(packing)
            check = held.runner.checker(held)
            assert check is not None
            return held, check

        def fits(offload: Offload, budget: Budget) -> bool:
            held, check = check_by(offload.packing)
            demand, host = check(offload), budget.host_memory
            if demand is None or (host is not None and demand.pinned_bytes > host):
                return False
            if demand.more_gpu_bytes <= 0 and question.goal.pipeline_parallel == 1 and host is None:
                return True
            taken = predict(held, self.space.machine, question.workload, budget, offload)
            fits_host = host is None or taken.host_memory_bytes <= host
            more = max(0, demand.more_gpu_bytes)
            return fits_host and taken.gpu_memory.total_bytes + more <= budget.gpu_memory

        return fits

    def find(
        self,
        budget: Budget,
        aim: Aim,
        limit: float = NEVER,
        max_rules: int = MAX_RULES,
        rival: Found | None = None,
    ) -> Search:
        """Find the best plan of a value below ``limit``; of equally good ones the plainest.

        None is found where no plan of up to ``max_rules`` fits, or is wanted. A ``rival``, which
        was found elsewhere, is chosen where it is as good.
        """
        firsts = self.firsts(budget)
        run = _Run(self, find_room(self.space, budget), aim, limit)
        run.try_in_place(firsts)
        run.try_all(choose(firsts.rows, firsts.rows.lacking_bytes <= 0), 16)
        if rival is not None:
            run.offer(rival.rank, rival.times_ps, rival.write)
        if not self.space.runner.takes_one_rule and max_rules > 1:
            run.try_all(run.list_pairs(firsts.rows), 64)
        run.search.best = run.choose()
        singles = (each.value for each in run.found if each.rank[0] <= 1)
        run.search.single = min(singles, default=NEVER)
        run.search.num_candidates = firsts.num_candidates
        run.search.gpu_lack, run.search.host_lack = firsts.gpu_lack, firsts.host_lack
        return run.search


@dataclass
class _Run:
    """One search: a room, an aim, and what was priced so far."""

    searcher: Searcher
    room: Room
    aim: Aim
    most: float
    """The best value so far: no plan is priced whose estimate is not better."""
    search: Search = field(default_factory=Search)
    found: list[Found] = field(default_factory=list)
    """Plans that may be chosen."""

    def __post_init__(self) -> None:
        self.space, self.rules = self.searcher.space, self.searcher.rules
        self.prices, self.stages = self.searcher.prices, self.searcher.stages

    def try_in_place(self, firsts: Firsts) -> None:
        """Try the plans that copy nothing."""
        for each in firsts.in_place:
            write = partial(self._write, each.setting, 1, each.rules)
            times = each.times_ps
            if self.stages is not None:
                more = self.stages.price_offload(write(), each.setting)
                if more is None:
                    continue
                times = times[0] + more[0], times[1] + float(more[1])
            num_segments = sum(len(rule.cpu_offload_params) for rule in each.rules)
            self.offer((len(each.rules), 0, num_segments, 1, 0), times, write)

    def list_pairs(self, firsts: Rows) -> Rows:
        """List the pairs of two rules whose estimates are better than the best plan so far."""
        rules, loads, slot_bytes = self.rules, self.rules.loads, self.rules.loads.slot_bytes[0]
        rows = choose(firsts, self._gain(self._relieve(firsts)))
        # what each option's second rules have to free, and the smallest rule that does
        more = np.maximum(0, rules.least_slot - slot_bytes[rows.first][:, None])
        missing = np.maximum(1, rows.lacking_bytes[:, None] + rows.num_slots[:, None] * more)
        second = rules.find(missing)
        disjoint = self.searcher.disjoint[rules.option[rows.first]]
        row, option = np.nonzero((second < rules.ends) & disjoint)
        second = second[row, option]
        turns = rules.loads.prompt_turns[0, rows.first[row]] + rules.loads.prompt_turns[0, second]
        num_slots = rows.num_slots[row]
        streams = np.where(num_slots == 0, turns == 0, turns > num_slots)
        row, second = row[streams], second[streams]
        # a larger second rule frees room for rungs: the smallest says nothing then
        climbing = loads.climbing[0]
        climbs = (climbing[rows.first[row]] >= 0) | (climbing[second] >= 0)
        better = self._better(rows, row[~climbs], second[~climbs])
        row, second = (
            np.concatenate(each) for each in zip(better, (row[climbs], second[climbs]), strict=True)
        )
        # every rule of the option from the smallest one on
        counts = rules.ends[rules.option[second]] - second
        following = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row, second = self._better(
            rows, np.repeat(row, counts), np.repeat(second, counts) + following
        )
        return self._pair(choose(rows, row), second)

    def _pair(self, rows: Rows, second: Ints) -> Rows:
        """Add second rules to first ones."""
        loads, setting, num_slots = self.rules.loads, rows.setting, rows.num_slots
        one, two = choose(loads, setting, rows.first), choose(loads, setting, second)
        both = one.with_second(two)
        more = num_slots * (both.slot_bytes - one.slot_bytes)
        spare = two.unit_bytes - rows.lacking_bytes - more
        prompt_ps, step_ps = estimate(self.prices, both, setting, num_slots, spare)
        return rows._replace(prompt_ps=prompt_ps, step_ps=step_ps, second=second)

    def _relieve(self, rows: Rows) -> Rows:
        """Estimate first rules that have rungs as if a second one took all else."""
        climbs = np.flatnonzero(self.rules.loads.climbing[0, rows.first] >= 0)
        if not len(climbs):
            return rows
        some = choose(rows, climbs)
        loads = choose(self.rules.loads, some.setting, some.first)
        spare = self.space.dense_bytes - some.lacking_bytes
        prompt_ps, step_ps = rows.prompt_ps.copy(), rows.step_ps.copy()
        times = estimate(self.prices, loads, some.setting, some.num_slots, spare)
        prompt_ps[climbs], step_ps[climbs] = times
        return rows._replace(prompt_ps=prompt_ps, step_ps=step_ps)

    def _better(self, rows: Rows, row: Ints, second: Ints) -> tuple[Ints, Ints]:
        """Keep the pairs whose estimates are better than the best plan so far."""
        kept = self._gain(self._pair(choose(rows, row), second))
        return row[kept], second[kept]

    def _gain(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether estimates are better than the best plan so far by more than is as good."""
        values = self.aim.values(rows.prompt_ps, rows.step_ps)
        return values * (1 + self.aim.tolerance) < self.most

    def try_all(self, rows: Rows, size: int) -> None:
        """Try plans by their estimates, in growing blocks, until none may be better."""
        values = self.aim.values(rows.prompt_ps, rows.step_ps) * (1 + self.aim.tolerance)
        order, start = np.argsort(values, kind="stable"), 0
        while start < len(order) and values[order[start]] < self.most:
            self._try(self._spread(choose(rows, order[start : start + size])))
            start, size = start + size, min(2 * size, BLOCK)

    def _spread(self, rows: Rows) -> Candidates:
        """Spread rules over layers: alone by all patterns, in pairs by that of smallest groups."""
        rules = self.rules
        counts = np.where(rows.second == NO_RULE, rules.num_patterns[rows.first], 1)
        row = np.repeat(np.arange(len(counts)), counts)
        following = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = choose(rows, row)
        return Candidates(
            rows.setting,
            rows.num_slots,
            rules.option[rows.first],
            rules.patterns[rules.first_pattern[rows.first] + following],
            rules.option[rows.second],
            rules.patterns[rules.first_pattern[rows.second]],
        )

    def _try(self, candidates: Candidates) -> None:
        """Price candidates that fit, and keep those that may be chosen."""
        numbers = self.prices.number_all(candidates)
        off_gpu, on_host, num_turns = self.prices.weigh(
            numbers, candidates.prefetch_step, candidates.setting
        )
        padding = self.space.padding_bytes[candidates.first]
        spare = off_gpu - self.room.lacking_bytes[candidates.setting] - padding
        fits, rungs = self.prices.climb(candidates, spare)
        fits &= (spare >= 0) & (on_host <= self.room.host_bytes[candidates.setting])
        fits &= (num_turns > candidates.prefetch_step) | (candidates.prefetch_step == 0)
        rows = np.flatnonzero(fits)
        candidates, on_host = choose(candidates, rows), on_host[fits]
        rungs = None if rungs is None else choose(rungs, rows)
        if not fits.any():
            return
        self.search.num_priced += len(on_host)
        given = numbers[rows], candidates.setting, candidates.prefetch_step, rungs
        prompt_ps, step_ps = self.prices.price(*given)
        if self.stages is not None:
            more = self.stages.price(candidates)
            fits = on_host + more.host_bytes <= self.room.host_bytes[candidates.setting]
            prompt_ps = np.where(fits & more.has_same_flags, prompt_ps + more.prompt_ps, NEVER)
            step_ps = step_ps + more.step_ps
        values = self.aim.values(prompt_ps, step_ps)
        ranks = self._rank(candidates, on_host)
        for number in np.argsort(values, kind="stable").tolist():
            if values[number] > self.most * (1 + self.aim.tolerance) or values[number] == NEVER:
                return
            times = float(prompt_ps[number]), float(step_ps[number])
            of_layer = () if rungs is None else rungs.of_layer[number].tolist()
            write = partial(self._write_candidate, candidates, number, of_layer)
            self.offer(tuple(ranks[number].tolist()), times, write)

    def _rank(self, candidates: Candidates, on_host: Ints) -> Ints:
        """Return how plain candidates are, [candidates, 5]."""
        sizes = np.append(list_patterns(len(self.space.kind_of)).group_size, 0)
        segments = [len(option.segment_class.segments) for option in self.space.options]
        num_segments = np.append(segments, 0)
        return np.column_stack(
            [
                1 + (candidates.second != NO_RULE),
                on_host,
                num_segments[candidates.first] + num_segments[candidates.second],
                candidates.prefetch_step,
                sizes[candidates.first_pattern] + sizes[candidates.second_pattern],
            ]
        )

    def _write_candidate(
        self, candidates: Candidates, number: int, rungs: Sequence[int]
    ) -> Offload:
        setting, num_slots, *taken = (int(column[number]) for column in candidates)
        patterns = list_patterns(len(self.space.kind_of))
        fewest = min((each for each in rungs if each), default=1)
        more = sum(each > fewest for each in rungs)
        rules = tuple(
            self.space.options[option].rule(
                int(patterns.group_size[pattern]),
                int(patterns.num_in_group[pattern]),
                fewest,
                more,
            )
            for option, pattern in (taken[:2], taken[2:])
            if option != NO_RULE
        )
        return self._write(setting, max(1, num_slots), rules)

    def _write(self, setting: int, prefetch_step: int, rules: tuple[Rule, ...]) -> Offload:
        chosen = self.space.settings[setting]
        return Offload(
            prefetch_step=prefetch_step,
            prefill_chunk=chosen.prefill_chunk,
            embeddings=chosen.embeddings,
            store=self.space.machine.store,
            packing=self.space.packing,
            rules=rules,
        )

    def offer(
        self, rank: tuple[int, ...], times_ps: tuple[float, float], write: Callable[[], Offload]
    ) -> None:
        """Keep a plan that may be chosen; the best so far is one that the runner runs."""
        value = float(self.aim.values(*np.array(times_ps).reshape(2, 1))[0])
        if value == NEVER or value > self.most * (1 + self.aim.tolerance):
            return
        if value < self.most:
            if not self.searcher.can_export(write(), self.room.budget):
                return
            self.most = value
        self.found.append(Found(value, rank, times_ps, write))

    def choose(self) -> Found | None:
        """Return the plainest of the plans that are as good as the best."""
        good = [each for each in self.found if each.value <= self.most * (1 + self.aim.tolerance)]
        return next(
            (
                each
                for each in sorted(good, key=lambda each: (each.rank[0], each.value, each.rank))
                if self.searcher.can_export(each.offload, self.room.budget)
            ),
            None,
        )
