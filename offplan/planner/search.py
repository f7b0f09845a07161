"""Best-first search: families in the order of their bounds, until no bound is better."""

from dataclasses import dataclass
from fractions import Fraction

from offplan.costs.predict import price_request
from offplan.placement import place_units
from offplan.plan import Offload, Rule
from offplan.planner.families import Family
from offplan.planner.problem import Problem


@dataclass(frozen=True)
class Found:
    """The best candidate, and what it took to find it."""

    offload: Offload
    num_candidates: int
    """That fit the budget."""
    num_priced: int
    """Whose schedule was priced; bounds ruled out all others."""


def find_best(problem: Problem, families: list[Family]) -> Found:
    """Find the fastest candidate; of equally fast ones the first in the order of the families.

    Exact: a family is passed over only if its bound is no better than what was found.
    """
    best: tuple[Fraction, tuple[object, ...]] | None = None
    chosen: tuple[Family, tuple[Rule, ...]] | None = None
    num_priced = 0
    for family in sorted(families):
        rank = family[1:]
        if best is not None and (Fraction(family.bound_ps), rank) > best:
            break
        for rules in family.members():
            objective = _objective_ps(problem, family, rules)
            num_priced += 1
            if best is None or (objective, rank) < best:
                best, chosen = (objective, rank), (family, rules)
            if objective <= family.bound_ps:
                break  # later members can only be as fast
    assert chosen is not None, "list_families gave at least one"
    family, rules = chosen
    return Found(
        family.offload(rules),
        num_candidates=sum(max(1, len(family.patterns)) for family in families),
        num_priced=num_priced,
    )


def _objective_ps(problem: Problem, family: Family, rules: tuple[Rule, ...]) -> Fraction:
    chosen = next(s for s in problem.settings if s.prefill_chunk == family.prefill_chunk)
    placement = place_units(problem.units, problem.model, family.offload(rules))
    times = price_request(placement, problem.model, problem.machine, chosen.prefill, problem.decode)
    return times.objective_ps(problem.workload.output_tokens)
