"""GPU memory against speed."""

from itertools import pairwise

import pytest

from offplan.errors import InfeasibleError
from offplan.library.asking import pose
from offplan.plan import Budget
from offplan.planner.frontier import GIB, NUM_POINTS, find_frontier, spread_budgets
from offplan.planner.make import make_plan
from offplan.report.frontier import render_frontier
from tests.costs.builders import make_machine, moe_model
from tests.planner.cases import UNLIMITED, WORKLOAD, ask
from tests.rendering import show

MODEL, MACHINE = moe_model(4), make_machine()


@pytest.mark.slow
def test_frontier_goes_from_the_least_to_all() -> None:
    heard: list[tuple[int, int]] = []
    question = pose(MODEL, MACHINE, WORKLOAD, UNLIMITED)
    points = find_frontier(question, lambda *progress: heard.append(progress))
    budgets = [point.plan.budget.gpu_memory for point in points]
    times = [point.plan.prediction.objective_s for point in points]
    assert budgets == sorted(budgets)
    assert heard == [(number, len(points) - 1) for number in range(1, len(points))]
    assert points[-1].plan.offload.rules == ()
    assert points[-1].plan.prediction.host_memory_bytes == 0
    assert all(later <= sooner for sooner, later in pairwise(times))
    lines = show(render_frontier(points)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("█" in line for line in lines) == len(points)


@pytest.mark.slow
def test_points_are_the_plans_of_their_budgets() -> None:
    question = ask(MODEL, MACHINE, 0.6)
    points = find_frontier(question)
    assert points[-1].plan == make_plan(question).plan
    budgets = [point.plan.budget.gpu_memory for point in points]
    results = [make_plan(question.with_gpu_memory(budget)) for budget in budgets]
    assert [point.plan for point in points] == [result.plan for result in results]
    for (point, now), (_, then) in pairwise(zip(points, results, strict=True)):
        more = then.plan.budget.gpu_memory - now.plan.budget.gpu_memory
        assert point.saved_per_gib_s == pytest.approx((now.best_s - then.best_s) / (more / GIB))
        assert (point.saved_per_gib_s or 0) >= 0


def test_budgets_are_those_of_cards() -> None:
    sizes = spread_budgets(2 * GIB, 30 * GIB)
    assert len(sizes) == NUM_POINTS
    assert {size * GIB for size in (2, 8, 12, 16, 24, 30)} <= sizes
    assert min(after - before for before, after in pairwise(sorted(sizes))) == GIB
    assert {24 * GIB, 141 * GIB} <= spread_budgets(2 * GIB, 300 * GIB)
    assert spread_budgets(3, 5) == {3, 4, 5}


@pytest.mark.slow
def test_a_frontier_may_be_one_point() -> None:
    """As where a small model takes hardly anything beside the overhead."""
    machine = make_machine(gpu_memory=2**41)
    overhead = machine.gpu_overhead.model_copy(update={"value": 2**40})
    machine = machine.model_copy(update={"gpu_overhead": overhead})
    points = find_frontier(pose(MODEL, machine, WORKLOAD, Budget(gpu_memory=2**41)))
    assert [point.saved_per_gib_s for point in points] == [None]


def test_where_the_budget_does_not_fit_there_is_no_frontier() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        find_frontier(ask(MODEL, MACHINE, -0.5))
