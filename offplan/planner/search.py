"""Best-first search: candidates in the order of their bounds, until no bound is better."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import nextafter

from offplan.costs.predict import price_request
from offplan.placement import place_units
from offplan.plan import Offload
from offplan.planner.candidates import list_candidates
from offplan.planner.combinations import Combination, Combinations, list_combinations
from offplan.planner.contents import Choice, Pricer
from offplan.planner.families import Family
from offplan.planner.problem import Problem
from offplan.planner.singles import Singles
from offplan.planner.space import list_singles
from offplan.planner.targets import NEVER, Goal, Time

MOST_RULES = 3
"""Of plans that are searched."""


@dataclass(frozen=True)
class Found:
    """The best candidate of a space, and what it took to find it."""

    offload: Offload
    value: Time
    """By the goal: of a request, in picoseconds."""


@dataclass(frozen=True)
class Search:
    """What was chosen, and among how many."""

    chosen: Found
    num_candidates: int
    """Plans of at most one rule that fit the budget."""
    num_priced: int
    """Plans whose timeline was run."""
    max_rules: int
    """No plan of up to so many rules is better."""
    single: Found | None
    """The best plan of at most one rule; None where none reaches the goal."""

    @property
    def second_rule_gain(self) -> float:
        """The value of the best plan of at most one rule over that of the chosen one."""
        return 1.0 if self.single is None else float(self.single.value / self.chosen.value)


def find_best(problem: Problem, goal: Goal) -> Search | None:
    """Find the best plan; of those that are as good, one of the fewest rules.

    Exact: what is passed over has a bound no better than what was found. None where no plan
    reaches the goal at all.
    """
    searcher = _Searcher(problem, goal)
    combinations, max_rules = list_combinations(problem), 1
    singles = list_singles(problem, combinations.classes)
    single = chosen = searcher.find_single(singles)
    while problem.restriction is None and max_rules < MOST_RULES:
        max_rules += 1
        limit = NEVER if chosen is None else chosen.value
        chosen = searcher.find_combination(combinations, max_rules, limit) or chosen
    if chosen is None:
        return None
    return Search(
        chosen,
        num_candidates=singles.num_members,
        num_priced=searcher.num_priced,
        single=single,
        max_rules=max_rules,
    )


@dataclass
class _Searcher:
    problem: Problem
    goal: Goal
    num_priced: int = 0
    pricer: Pricer = field(init=False)
    _steps: dict[tuple[object, ...], Fraction] = field(default_factory=dict)
    """Times of decode steps, which settings share."""

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.problem)

    def find_single(self, singles: Singles) -> Found | None:
        """Find the best plan of at most one rule; of equally good ones the first by rank."""
        best: tuple[Time, tuple[object, ...]] = (NEVER, ())
        found: tuple[Family, int] | None = None
        for bound, family in singles.by_bound(self.goal):
            rank = family.rank
            if (bound, rank) > best:
                break
            for number, value in self._price_members(family):
                if (value, rank) < best:
                    best, found = (value, rank), (family, number)
                if value <= bound:
                    break  # later members can only be as good
        if found is None:
            return None
        family, number = found
        return Found(family.offload(family.rules(number)), best[0])

    def _price_members(self, family: Family) -> Iterator[tuple[int, Time]]:
        """Price a family's members, in their order; those that are not allowed are left out."""
        problem = self.problem
        setting = next(
            number
            for number, setting in enumerate(problem.settings)
            if (setting.prefill_chunk, setting.embeddings)
            == (family.prefill_chunk, family.embeddings)
        )
        for number in range(family.num_members):
            offload = family.offload(family.rules(number))
            if problem.restriction is not None and not problem.restriction.allows(offload):
                continue
            self.num_priced += 1
            if family.max_bytes:  # takes layers in part, which a choice cannot say
                placement = place_units(problem.units, problem.model, offload)
                prompt, step = problem.settings[setting].prefill, problem.decode
                times = price_request(placement, problem.model, problem.machine, prompt, step)
                yield number, self.goal.value(times.prefill.step_ps, times.decode.step_ps)
                continue
            contents = self.pricer.contents(family.choices(number))
            num_slots = self.pricer.weigh(contents, family.prefetch_step).num_slots
            prefill = self.pricer.prefill_ps(contents, num_slots, setting)
            decode = self.pricer.decode_ps(contents, num_slots, setting)
            yield number, self.goal.value(prefill, decode)

    def find_combination(
        self, combinations: Combinations, num_rules: int, limit: Time
    ) -> Found | None:
        """Find the best plan of so many rules that is better than ``limit``, if there is one."""
        best: tuple[Combination, tuple[Choice, ...]] | None = None
        found, limit = limit, _ceil(limit)
        for combined in sorted(combinations.bounds(num_rules, self.goal, limit)):
            if combined.bound >= limit:
                break
            listed = list_candidates(combinations, combined, self.goal, limit)
            for candidate in sorted(listed):
                if candidate.bound >= limit:
                    break
                choices = combinations.choices(combined, candidate)
                value = self._price(combined, choices, limit)
                if value < found:
                    best, found, limit = (combined, choices), value, _ceil(value)
        if best is None:
            return None
        combined, choices = best
        setting = self.problem.settings[combined.setting]
        offload = Offload(
            prefetch_step=max(1, combined.num_slots),
            prefill_chunk=setting.prefill_chunk,
            embeddings=setting.embeddings,
            rules=tuple(choice.rule() for choice in choices),
        )
        return Found(offload, found)

    def _price(
        self,
        combined: Combination,
        choices: tuple[Choice, ...],
        limit: Time,
    ) -> Time:
        """Price a plan of several rules; NEVER if it does not fit or cannot be below ``limit``."""
        problem, setting = self.problem, self.problem.settings[combined.setting]
        contents = self.pricer.contents(choices)
        weighed = self.pricer.weigh(contents, combined.num_slots)
        if weighed.saved_bytes < setting.lacking_bytes:
            return NEVER
        if problem.host_lack(weighed.host_bytes, setting) > 0:
            return NEVER
        self.num_priced += 1
        key = (choices, weighed.num_slots, setting.row_ps[1])
        decode = self._steps.get(key)
        if decode is None:
            decode = self.pricer.decode_ps(contents, weighed.num_slots, combined.setting)
            self._steps[key] = decode
        if self.goal.value(setting.prefill.resident_ps, decode) >= limit:
            return NEVER
        prefill = self.pricer.prefill_ps(contents, weighed.num_slots, combined.setting)
        return self.goal.value(prefill, decode)


def _ceil(value: Time) -> float:
    """The least float that is no less: they compare much faster than fractions."""
    nearest = float(value)
    return nearest if nearest >= value else nextafter(nearest, NEVER)
