"""Times to keep: exact, and an answer where they cannot be kept."""

from itertools import product

import pytest

from offplan.errors import InfeasibleError
from offplan.plan import Goal, Workload
from offplan.planner.infeasible import RESOLUTION
from offplan.planner.make import make_plan
from offplan.report.explain import explain_plan
from offplan.units import format_bytes, format_seconds
from tests.costs.builders import DENSE, MOE, Shapes, make_machine, make_model, moe_model
from tests.planner.brute_force import BruteForce, Priced
from tests.planner.cases import FEW_DENSE, FEW_MOE, ask, assert_fastest
from tests.tiers import each_value_once, others_in_sweep

MODEL, MACHINE = moe_model(4), make_machine(gpu_memory=2**23)
SHORT = Workload(prompt_tokens=512)
LAYERS = [FEW_DENSE, FEW_MOE], [DENSE, MOE]


@pytest.mark.slow
def test_targets_that_are_kept_change_nothing_but_the_goal() -> None:
    goal = Goal(max_ttft=60.0, max_tpot=60.0)
    kept, fastest = (make_plan(ask(MODEL, MACHINE, 0.5, goal=each)) for each in (goal, Goal()))
    assert kept.plan == fastest.plan.model_copy(update={"goal": goal})
    assert "of the plans that keep --max-ttft 60 s and --max-tpot 60 s" in explain_plan(kept)[-1]


def test_a_plan_s_own_step_is_a_target_that_it_keeps() -> None:
    """To the last picosecond: an estimate that rounding made longer would leave the plan out."""
    machine = make_machine(h2d=5e10, uva=5e10)
    workload = Workload(batch=3, prompt_tokens=1, output_tokens=50, context=2600)
    asked = moe_model(6), machine, 0.28820282150359844, workload
    step_s = make_plan(ask(*asked, Goal(packing=False))).plan.prediction.decode.step_s
    kept = make_plan(ask(*asked, Goal(packing=False, max_tpot=step_s))).plan
    assert kept.prediction.decode.step_s <= step_s


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "part"), each_value_once(product(LAYERS, (0.1, 0.5, 0.95))))
def test_a_target_out_of_reach_names_memory_that_would_do(
    layers: list[Shapes], part: float
) -> None:
    """Enough for a plan, and at most a hundredth more than any plan needs."""
    model = make_model(layers)
    least_s, most_s = (
        make_plan(ask(model, MACHINE, share, SHORT)).plan.prediction.decode.step_s
        for share in (1.2, 0.5)
    )
    goal = Goal(max_tpot=least_s + part * (most_s - least_s), packing=False)
    question = ask(model, MACHINE, 0.5, SHORT, goal)
    with pytest.raises(InfeasibleError) as error:
        make_plan(question)
    budget, shortfall = question.budget.gpu_memory, error.value.shortfall_bytes
    assert shortfall is not None
    assert f"; {format_bytes(budget + shortfall)} of GPU memory would do" in str(error.value)
    limit_s = question.goal.max_tpot_s
    assert limit_s is not None
    enough = make_plan(question.with_gpu_memory(budget + shortfall)).plan
    assert enough.prediction.decode.step_s <= limit_s
    less = question.with_gpu_memory(budget + shortfall - budget // RESOLUTION - 1)
    found = BruteForce(less, (512,))
    assert all(each.decode_s > limit_s for each in [*found.singles, *found.pairs])


@pytest.mark.slow
def test_a_target_that_no_memory_reaches() -> None:
    question = ask(MODEL, MACHINE, 0.5, goal=Goal(max_tpot=1e-9))
    with pytest.raises(InfeasibleError, match="no GPU memory of this machine would do") as error:
        make_plan(question)
    assert error.value.shortfall_bytes is None


@pytest.mark.slow
def test_where_nothing_fits_targets_are_not_what_is_missing() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        make_plan(ask(MODEL, MACHINE, -0.5, goal=Goal(max_tpot=1e-9)))


@pytest.mark.slow
@pytest.mark.parametrize("h2d", others_in_sweep([1e9, 20e9], [20e9]))
def test_targets_equal_brute_force(h2d: float) -> None:
    """The fastest within targets, or the nearest to them: as if every plan were looked at."""
    model, machine = (
        make_model([DENSE, MOE]),
        make_machine(h2d=h2d, uva=0.8 * h2d, gpu_memory=2**23),
    )
    found = BruteForce(ask(model, machine, 0.7, SHORT), (512,))
    everything = [*found.singles, *found.pairs]
    times = (
        sorted({each.prefill_s for each in everything}),
        sorted({each.decode_s for each in everything}),
    )
    reached = set()
    for ttft, tpot in product(*([each[0] / 2, each[9], each[99]] for each in times)):
        goal = Goal(max_ttft=ttft, max_tpot=tpot, packing=False)
        kept = [each.objective_s for each in everything if excess(each, goal) <= 1]
        reached.add(bool(kept))
        question = ask(model, machine, 0.7, SHORT, goal)
        if kept:
            result = make_plan(question)
            assert result.plan.prediction.prefill.step_s <= ttft
            assert result.plan.prediction.decode.step_s <= tpot
            assert_fastest(result, min(kept))
            continue
        with pytest.raises(InfeasibleError) as error:
            make_plan(question)
        named = [excess(each, goal) for each in everything if describe(each) in str(error.value)]
        nearest = min(excess(each, goal) for each in everything)
        assert min(named) == pytest.approx(nearest, rel=1e-9)
    assert reached == {True, False}


def excess(plan: Priced, goal: Goal) -> float:
    assert goal.max_ttft_s is not None
    assert goal.max_tpot_s is not None
    return max(plan.prefill_s / goal.max_ttft_s, plan.decode_s / goal.max_tpot_s)


def describe(plan: Priced) -> str:
    """What the error says of the nearest plan."""
    first, other = format_seconds(plan.prefill_s), format_seconds(plan.decode_s)
    return f"first token after {first} and takes {other} a token"
