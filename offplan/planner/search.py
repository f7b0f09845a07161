"""Best-first search: families in the order of their bounds, until no bound is better."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from offplan.costs.predict import price_request
from offplan.placement import place_units
from offplan.plan import Offload
from offplan.planner.contents import Choice, Pricer
from offplan.planner.families import Family
from offplan.planner.pairs import PairBound, Pairs, list_pairs
from offplan.planner.problem import Problem

SIMPLER = 1.005
"""A plan of fewer rules is chosen when it takes no more than this times as long."""


@dataclass(frozen=True)
class Found:
    """The best candidate of a space, and what it took to find it."""

    offload: Offload
    objective_ps: Fraction
    num_priced: int
    """Whose timeline was run; bounds ruled out all others."""


@dataclass(frozen=True)
class Search:
    """What was chosen, and among how many."""

    chosen: Found
    num_candidates: int
    """Plans of at most one rule that fit the budget."""
    num_priced: int
    """Plans of one rule and of two whose timeline was run."""
    second_rule_gain: float
    """The time of the best plan of at most one rule over that of the chosen one."""


def find_best(problem: Problem, families: list[Family]) -> Search:
    """Find the fastest plan; one of two rules only if one rule takes SIMPLER times as long.

    Exact: what is passed over has a bound no better than what was found.
    """
    pricer = Pricer(problem)
    single = _find_single(pricer, families)
    pair, num_priced = _find_pair(pricer, list_pairs(problem), float(single.objective_ps) / SIMPLER)
    chosen = pair or single
    return Search(
        chosen,
        num_candidates=sum(max(1, len(family.patterns)) for family in families),
        num_priced=single.num_priced + num_priced,
        second_rule_gain=float(single.objective_ps / chosen.objective_ps),
    )


def _find_single(pricer: Pricer, families: list[Family]) -> Found:
    """Find the fastest plan of at most one rule; of equally fast ones the first of the families."""
    best: tuple[Fraction, tuple[object, ...]] | None = None
    found: tuple[Family, int] | None = None
    num_priced = 0
    for family in sorted(families):
        rank = family[1:]
        if best is not None and (Fraction(family.bound_ps), rank) > best:
            break
        for number, objective in enumerate(_price_members(pricer, family)):
            num_priced += 1
            if best is None or (objective, rank) < best:
                best, found = (objective, rank), (family, number)
            if objective <= family.bound_ps:
                break  # later members can only be as fast
    assert best is not None, "list_families gave at least one"
    assert found is not None
    family, number = found
    return Found(family.offload(list(family.members())[number]), best[0], num_priced)


def _price_members(pricer: Pricer, family: Family) -> Iterator[Fraction]:
    """Price a family's members, in their order."""
    problem = pricer.problem
    setting = next(
        number
        for number, setting in enumerate(problem.settings)
        if (setting.prefill_chunk, setting.embeddings) == (family.prefill_chunk, family.embeddings)
    )
    for choices in family.choices():
        contents = pricer.contents(choices)
        num_slots = pricer.weigh(contents, family.prefetch_step).num_slots
        yield pricer.objective_ps(contents, num_slots, setting)
    if family.max_bytes:  # takes layers in part, which a choice cannot say
        (rules,) = family.members()
        placement = place_units(problem.units, problem.model, family.offload(rules))
        prefill = problem.settings[setting].prefill
        times = price_request(placement, problem.model, problem.machine, prefill, problem.decode)
        yield problem.weights[0] * times.prefill.step_ps + problem.weights[1] * times.decode.step_ps


def _find_pair(pricer: Pricer, pairs: Pairs, limit_ps: float) -> tuple[Found | None, int]:
    """Find the fastest plan of two rules that takes less than ``limit_ps``, if there is one."""
    best: tuple[Fraction, PairBound, tuple[Choice, Choice]] | None = None
    num_priced = 0
    for pair in sorted(pairs.bounds(limit_ps)):
        if pair.bound_ps >= limit_ps:
            break
        for candidate in sorted(pairs.candidates(pair, limit_ps)):
            if candidate.bound_ps >= limit_ps:
                break
            choices = pairs.choices(candidate)
            objective = _price_pair(pricer, pair, choices)
            num_priced += 1
            if objective is not None and objective < limit_ps:
                best, limit_ps = (objective, pair, choices), float(objective)
    if best is None:
        return None, num_priced
    objective, pair, choices = best
    setting = pricer.problem.settings[pair.setting]
    offload = Offload(
        prefetch_step=max(1, pair.num_slots),
        prefill_chunk=setting.prefill_chunk,
        embeddings=setting.embeddings,
        rules=tuple(choice.rule() for choice in choices),
    )
    return Found(offload, objective, num_priced), num_priced


def _price_pair(pricer: Pricer, pair: PairBound, choices: Sequence[Choice]) -> Fraction | None:
    """Price a plan of two rules; None if it does not fit, or a ring holds all that streams."""
    problem, setting = pricer.problem, pricer.problem.settings[pair.setting]
    contents = pricer.contents(choices)
    weighed = pricer.weigh(contents, pair.num_slots)
    if pair.num_slots and weighed.num_streamed <= pair.num_slots:
        return None
    if weighed.saved_bytes < setting.lacking_bytes:
        return None
    if problem.host_lack(weighed.host_bytes, setting) > 0:
        return None
    return pricer.objective_ps(contents, weighed.num_slots, pair.setting)
