"""The search of one space: rules that are a plan alone, then every pair of two that may be better.

Plans of one rule are priced in the order of their estimates, as long as an estimate is better than
the best plan so far. A first rule is kept if its estimate is better than that plan. An option of
second rules is kept for it if the smallest one that frees what is missing makes an estimate that is
better still. Then each rule of the option is tried, best estimates first.

Estimates are low, so what is passed over is hardly ever better. More memory or a faster link only
add plans or make them faster, so the best plan found is not slower.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.plan import Budget, Offload
from offplan.planner.aims import NEVER, Aim, Fastest, Floats, value_of
from offplan.planner.candidates import NO_RULE, Candidates, Ints, choose, count_on
from offplan.planner.estimates import Rules, estimate, list_rules, most_rounded_ps
from offplan.planner.in_place import InPlaceRules
from offplan.planner.limits import check_range, make_check
from offplan.planner.options import list_options
from offplan.planner.prices import Prices
from offplan.planner.single_rule_plans import Rows, SingleRulePlans, list_single_rule_plans
from offplan.planner.space import Room, Space, find_room
from offplan.planner.stages import Stages
from offplan.planner.writing import list_plainness, write_candidate, write_rules

MAX_RULES = 2
"""Rules of a plan, at most."""
BLOCK = 1024
"""Candidates priced together: enough to make an array's own cost a small share."""


class Candidate(NamedTuple):
    """A plan and how good it is."""

    value: float
    """Value by the search's aim."""
    order: tuple[int, ...]
    """Order among equally good ones: rules, host bytes, segments, slots, groups."""
    times_ps: tuple[float, float]
    """Picoseconds of the prompt, and of a decode step."""
    write: Callable[[], Offload]

    @property
    def offload(self) -> Offload:
        """The plan's decision."""
        return self.write()


@dataclass
class Search:
    """The best plan found, and the numbers of plans looked at."""

    best: Candidate | None = None
    single: float = NEVER
    """The value of the best plan of at most one rule; NEVER if none is wanted."""
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
    trades: bool = True
    """False leaves out options whose rules may make the request longer: ``Rule.trades_request``."""
    recodes: bool = True
    """False leaves out plans of recoded weights."""
    _plans: tuple[Budget, SingleRulePlans] | None = None

    def __post_init__(self) -> None:
        check_range(self.space)

    @cached_property
    def recoded(self) -> "Searcher | None":
        """Searches the same question with all recoded that may be; None if nothing may be."""
        recoding = self.space.question.recoding if self.recodes else None
        if recoding is None:
            return None
        return Searcher(replace(self.space, recoding=recoding), self.trades, self.recodes)

    @cached_property
    def untraded(self) -> "Searcher":
        """Searches the same space without options whose rules may make the request longer."""
        return Searcher(self.space, trades=False, recodes=self.recodes)

    @property
    def every(self) -> "list[Searcher]":
        """This one, and that with all recoded."""
        return [self, *([] if self.recoded is None else [self.recoded])]

    @property
    def spaces(self) -> list[Space]:
        """All that are searched."""
        return [each.space for each in self.every]

    @property
    def spared_bytes(self) -> int:
        """Bytes of GPU memory that a plan in parts of all layers may lack, at most."""
        return max(0, -int(self.prices.numbers.shared_bytes.min()))

    @property
    def fastest(self) -> Fastest:
        """The aim of the question: the least time of a request that keeps the targets."""
        return Fastest(self.space.weights, self.space.limits_ps)

    @cached_property
    def prices(self) -> Prices:
        """Exact memory and times."""
        options = list_options(self.space)
        wanted = (o for o in options if self.trades or not o.every_layer.trades_request)
        return Prices(self.space, (*wanted,))

    @cached_property
    def rules(self) -> Rules:
        """The rules that plans may have."""
        return list_rules(self.space, self.prices)

    @cached_property
    def stages(self) -> Stages | None:
        """The other stages of a pipeline, whose times add up; None if there is one stage."""
        if self.space.stage.num_stages == 1:
            return None
        return Stages(self.space, self.prices.options)

    @cached_property
    def in_place(self) -> InPlaceRules:
        """Plans that copy nothing."""
        return InPlaceRules(self.prices)

    def firsts(self, budget: Budget) -> SingleRulePlans:
        """List what a budget leaves of the rules; the last list is kept for the next aim."""
        if self._plans is None or self._plans[0] != budget:
            room = find_room(self.space, budget)
            self._plans = (
                budget,
                list_single_rule_plans(self.prices, self.rules, self.in_place, room),
            )
        return self._plans[1]

    @cached_property
    def disjoint(self) -> NDArray[np.bool_]:
        """True if two options have no parameter in common, [options, options]."""
        taken = [self.space.taken(option.segment_class) for option in self.prices.options]
        held = [{id(unit) for units in kinds for unit in units} for kinds in taken]
        return np.array([[one.isdisjoint(other) for other in held] for one in held])

    @cached_property
    def can_run(self) -> Callable[[Offload, Budget], bool]:
        """Tells whether the runner can run a plan, and what it takes fits a budget."""
        return make_check(self.space)

    def find(
        self,
        budget: Budget,
        aim: Aim,
        limit: float = NEVER,
        max_rules: int = MAX_RULES,
        rival: Candidate | None = None,
    ) -> Search:
        """Find the best plan of a value below ``limit``; of equally good ones the plainest.

        None is found where no plan of up to ``max_rules`` fits, or is wanted. A ``rival``, which
        was found elsewhere, is chosen where it is as good.
        """
        firsts = self.firsts(budget)
        run = _Run(self, find_room(self.space, budget), aim, limit)
        run.try_in_place(firsts)
        run.try_all(choose(firsts.rows, firsts.rows.is_plan), 16)
        if rival is not None:
            run.offer(rival.order, rival.times_ps, rival.write)
        if not self.space.question.runner.takes_one_rule and max_rules > 1:
            run.try_all(run.list_pairs(firsts.rows), 64)
        run.search.best = run.choose()
        singles = (each.value for each in run.found if each.order[0] <= 1)
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
    found: list[Candidate] = field(default_factory=list)
    """Plans that may be chosen."""

    def __post_init__(self) -> None:
        self.space, self.rules = self.searcher.space, self.searcher.rules
        self.prices, self.stages = self.searcher.prices, self.searcher.stages
        self.estimated = self.aim.loosened(most_rounded_ps(self.space))

    def try_in_place(self, firsts: SingleRulePlans) -> None:
        """Try the plans that copy nothing."""
        for each in firsts.in_place:
            write = partial(write_rules, self.space, each.setting, 1, each.rules)
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
        # the second has to free something where the first is no plan alone: enough layers stream
        left = np.maximum(rows.lacking_bytes, np.where(rows.is_plan, -np.inf, 1))
        missing = np.maximum(1, left[:, None] + rows.num_slots[:, None] * more)
        second = rules.find(rows.setting, missing)
        disjoint = self.searcher.disjoint[rules.option[rows.first]]
        row, option = np.nonzero((second < rules.ends) & disjoint)
        second = second[row, option]
        turns = rules.loads.prompt_turns[0, rows.first[row]] + rules.loads.prompt_turns[0, second]
        num_slots = rows.num_slots[row]
        streams = np.where(num_slots == 0, turns == 0, turns > num_slots)
        row, second = row[streams], second[streams]
        # what two rules take of a layer lies in one slab, which is no smaller than both
        row, second = self._hold(rows, row, second, rules.least_slabs)
        # a larger second rule frees room for caches: the smallest says nothing then
        with_curve = loads.with_curve[0]
        has_curve = (with_curve[rows.first[row]] >= 0) | (with_curve[second] >= 0)
        better = self._better(rows, row[~has_curve], second[~has_curve])
        row, second = (
            np.concatenate(each)
            for each in zip(better, (row[has_curve], second[has_curve]), strict=True)
        )
        # every rule of the option from the smallest one on
        which, second = count_on(second, rules.ends[rules.option[second]] - second)
        row, second = self._hold(rows, row[which], second, loads.slab_bytes[0])
        row, second = self._better(rows, row, second)
        return self._pair(choose(rows, row), second)

    def _hold(self, rows: Rows, row: Ints, second: Ints, slab_bytes: Floats) -> tuple[Ints, Ints]:
        """Keep the pairs that the store has room for, if each second rule takes ``slab_bytes``."""
        taken = self.rules.loads.slab_bytes[0, rows.first[row]] + slab_bytes[second]
        kept = taken <= self.room.host_bytes[rows.setting[row]]
        return row[kept], second[kept]

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
        """Estimate first rules that have caches as if a second one took all else."""
        has_curve = np.flatnonzero(self.rules.loads.with_curve[0, rows.first] >= 0)
        if not len(has_curve):
            return rows
        some = choose(rows, has_curve)
        loads = choose(self.rules.loads, some.setting, some.first)
        spare = self.space.dense_bytes - some.lacking_bytes
        prompt_ps, step_ps = rows.prompt_ps.copy(), rows.step_ps.copy()
        times = estimate(self.prices, loads, some.setting, some.num_slots, spare)
        prompt_ps[has_curve], step_ps[has_curve] = times
        return rows._replace(prompt_ps=prompt_ps, step_ps=step_ps)

    def _better(self, rows: Rows, row: Ints, second: Ints) -> tuple[Ints, Ints]:
        """Keep the pairs whose estimates are better than the best plan so far."""
        kept = self._gain(self._pair(choose(rows, row), second))
        return row[kept], second[kept]

    def _gain(self, rows: Rows) -> NDArray[np.bool_]:
        """Return True for estimates better than the best plan so far by more than is as good."""
        values = self.estimated.values(rows.prompt_ps, rows.step_ps)
        return values * (1 + self.aim.tolerance) < self.most

    def try_all(self, rows: Rows, size: int) -> None:
        """Try plans by their estimates, in growing blocks, until none may be better."""
        values = self.estimated.values(rows.prompt_ps, rows.step_ps) * (1 + self.aim.tolerance)
        order, start = np.argsort(values, kind="stable"), 0
        while start < len(order) and values[order[start]] < self.most:
            self._try(self._spread(choose(rows, order[start : start + size])))
            start, size = start + size, min(2 * size, BLOCK)

    def _spread(self, rows: Rows) -> Candidates:
        """Spread rules over layers: alone by all patterns, in pairs by that of smallest groups."""
        rules = self.rules
        counts = np.where(rows.second == NO_RULE, rules.num_patterns[rows.first], 1)
        row, at = count_on(rules.first_pattern[rows.first], counts)
        rows = choose(rows, row)
        return Candidates(
            rows.setting,
            rows.num_slots,
            rules.option[rows.first],
            rules.patterns[at],
            rules.option[rows.second],
            rules.patterns[rules.first_pattern[rows.second]],
        )

    def _try(self, candidates: Candidates) -> None:
        """Price candidates that fit, and keep those that may be chosen."""
        numbers = self.prices.number_all(candidates)
        off_gpu, on_host, num_turns = self.prices.weigh(numbers, candidates.prefetch_step)
        padding = self.prices.padding_bytes[candidates.first]
        spare = off_gpu - self.room.lacking_bytes[candidates.setting] - padding
        fits, own = self.prices.spend(candidates, spare)
        fits &= on_host <= self.room.host_bytes[candidates.setting]
        fits &= (num_turns > candidates.prefetch_step) | (candidates.prefetch_step == 0)
        rows = np.flatnonzero(fits)
        candidates, on_host = choose(candidates, rows), on_host[fits]
        own = None if own is None else choose(own, rows)
        if not fits.any():
            return
        self.search.num_priced += len(on_host)
        given = numbers[rows], candidates.setting, candidates.prefetch_step, own
        prompt_ps, step_ps = self.prices.price(*given)
        if self.stages is not None:
            more = self.stages.price(candidates)
            fits = on_host + more.host_bytes <= self.room.host_bytes[candidates.setting]
            prompt_ps = np.where(fits & more.has_same_flags, prompt_ps + more.prompt_ps, NEVER)
            step_ps = step_ps + more.step_ps
        values = self.aim.values(prompt_ps, step_ps)
        plainness = list_plainness(self.prices, candidates, on_host)
        for number in np.argsort(values, kind="stable").tolist():
            if values[number] > self.most * (1 + self.aim.tolerance) or values[number] == NEVER:
                return
            times = float(prompt_ps[number]), float(step_ps[number])
            cache_sizes = () if own is None else own.cache_sizes[number].tolist()
            write = partial(write_candidate, self.prices, candidates, number, cache_sizes)
            self.offer(tuple(plainness[number].tolist()), times, write)

    def offer(
        self, order: tuple[int, ...], times_ps: tuple[float, float], write: Callable[[], Offload]
    ) -> None:
        """Keep a plan that may be chosen; the best so far is one that the runner runs."""
        value = value_of(times_ps, self.aim)
        if value == NEVER or value > self.most * (1 + self.aim.tolerance):
            return
        if value < self.most:
            if not self.searcher.can_run(write(), self.room.budget):
                return
            self.most = value
        self.found.append(Candidate(value, order, times_ps, write))

    def choose(self) -> Candidate | None:
        """Return the plainest of the plans that are as good as the best."""
        good = [each for each in self.found if each.value <= self.most * (1 + self.aim.tolerance)]
        return next(
            (
                each
                for each in sorted(good, key=lambda of: (of.order[0], of.value, of.order))
                if self.searcher.can_run(each.offload, self.room.budget)
            ),
            None,
        )
