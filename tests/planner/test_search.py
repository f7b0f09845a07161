"""The search: nearly as if every plan were looked at; within the budget and above the floor."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError
from offplan.library.asking import pose
from offplan.plan import Backend, Budget, Goal, Workload
from offplan.planner.make import make_plan
from offplan.report.explain import explain_plan
from tests.costs.builders import (
    DENSE,
    MOE,
    Shapes,
    dense_model,
    make_machine,
    make_model,
    moe_model,
)
from tests.held import input_embedding
from tests.planner.brute_force import BruteForce
from tests.planner.cases import (
    FEW_DENSE,
    FEW_MOE,
    MODELS,
    UNLIMITED,
    WORKLOAD,
    ask,
    assert_fastest,
    budget_for,
    models,
    plan_for,
    rates,
    shares,
    workloads,
)

SHORT = Workload(prompt_tokens=512)
"""Read in one chunk, so that there are fewer plans to look at."""


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [3, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("make", "share", "h2d"),
    [(dense_model, 0.3, 1e9), (dense_model, 0.7, 50e9), (moe_model, 0.5, 20e9)],
)
def test_one_rule_equals_brute_force(
    make: Callable[[int], Model], share: float, h2d: float, num_layers: int
) -> None:
    question = ask(make(num_layers), make_machine(h2d=h2d, uva=0.8 * h2d), share)
    result = make_plan(question)
    expected = min(each.objective_s for each in BruteForce(question, (600, 512)).singles)
    assert result.best_s * result.second_rule_gain == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "share", "h2d", "prompt"),
    [
        ([FEW_DENSE] * 3, 0.8, 5e9, 64),
        ([FEW_DENSE] * 3, 0.2, 1e9, 512),
        ([FEW_MOE] * 3, 0.8, 20e9, 512),
    ],
)
def test_one_output_token_takes_the_shortest_prompt_then_the_shortest_step(
    layers: list[Shapes], share: float, h2d: float, prompt: int
) -> None:
    workload = Workload(prompt_tokens=prompt, output_tokens=1, context=600)
    question = ask(make_model(layers), make_machine(h2d=h2d, uva=0.8 * h2d), share, workload)
    found = BruteForce(question, (prompt,))
    plans = [*found.singles, *found.pairs]
    least_s = min(each.prefill_s for each in plans)
    steps_s = {each.decode_s for each in plans if each.prefill_s == least_s}
    prediction = make_plan(question).plan.prediction
    assert prediction.objective_s == prediction.prefill.step_s == least_s
    assert len(steps_s) > 1
    assert prediction.decode.step_s == min(steps_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "share", "h2d", "num_rules"),
    [
        pytest.param([DENSE] * 3, 0.1, 10e9, 2, marks=pytest.mark.sweep),
        ([DENSE, MOE], 0.7, 1e9, 2),
        pytest.param([FEW_DENSE] * 4, 0.6, 5e9, 2, marks=pytest.mark.sweep),
        ([FEW_DENSE] * 3, 0.8, 5e9, 1),
        ([FEW_MOE, FEW_DENSE, FEW_MOE], 0.4, 5e9, 2),
        pytest.param([FEW_MOE] * 5, 0.2, 5e9, 2, marks=pytest.mark.sweep),
        # of a layer more, of which there are thrice as many plans
        pytest.param([FEW_DENSE] * 5, 0.6, 5e9, 2, marks=pytest.mark.sweep),
        pytest.param([FEW_DENSE, FEW_MOE] * 2, 0.4, 5e9, 2, marks=pytest.mark.sweep),
    ],
)
def test_two_rules_equal_brute_force(
    layers: list[Shapes], share: float, h2d: float, num_rules: int
) -> None:
    question = ask(make_model(layers), make_machine(h2d=h2d, uva=0.8 * h2d), share, SHORT)
    result = make_plan(question)
    found = BruteForce(question, (512,))
    single, pair = (
        min(each.objective_s for each in plans) for plans in (found.singles, found.pairs)
    )
    assert (pair < single) == (num_rules == 2), "choose a case of so many rules"
    assert_fastest(result, min(single, pair))
    assert (result.second_rule_gain > 1) == (num_rules == 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("dense", 0.3), ("moe", 0.5)])
def test_nothing_on_a_second_gpu_is_read_in_place(name: str, share: float) -> None:
    """Were it allowed, it would be best: its rate is twice that of copies."""
    model, machine = MODELS[name], make_machine(h2d=5e9, uva=40e9, peer=20e9)
    budget = budget_for(model, machine, share)
    on_host = plan_for(model, machine, budget).offload
    assert Backend.UVA in {rule.decode for rule in on_host.rules}
    question = pose(model, machine, WORKLOAD, budget, Goal(packing=False), store="peer")
    result = make_plan(question)
    plan = result.plan
    assert {(rule.prefill, rule.decode) for rule in plan.offload.rules} == {
        (Backend.PREFETCH, Backend.PREFETCH)
    }
    assert (plan.offload.store, plan.machine.h2d, plan.machine.link) == ("peer", 20e9, "peer GPU")
    expected = min(each.objective_s for each in BruteForce(question, (600, 512)).singles)
    assert result.best_s * result.second_rule_gain == pytest.approx(expected, rel=5e-3)


def test_an_embedding_on_the_host_takes_none_of_a_second_gpu() -> None:
    model, machine = MODELS["dense"], make_machine(peer=20e9)
    table = input_embedding(model)
    assert table is not None
    missing = table.nbytes // 2
    budget = Budget(gpu_memory=budget_for(model, machine, 1.0).gpu_memory - missing, host_memory=0)
    plan = plan_for(model, machine, budget, store="peer")
    assert (plan.offload.rules, plan.offload.embeddings) == ((), "host")
    assert plan.prediction.host_memory_bytes == table.nbytes
    assert plan.prediction.peer_memory_bytes == 0


@pytest.mark.slow
@settings(max_examples=25)
@given(models, shares, rates, workloads)
def test_plans_keep_the_budget_and_stay_above_the_floor(
    model: Model, share: float, h2d: float, workload: Workload
) -> None:
    question = ask(model, make_machine(h2d=h2d), share, workload)
    try:
        result = make_plan(question)
    except InfeasibleError:
        return
    prediction = result.plan.prediction
    assert prediction.gpu_memory.total_bytes <= question.budget.gpu_memory
    assert result.gap >= 1 - 1e-9
    assert prediction.decode.step_s >= result.floor.decode_s * (1 - 1e-9)
    assert prediction.prefill.step_s >= result.floor.prefill_s * (1 - 1e-9)
    for phase in (prediction.prefill, prediction.decode):
        assert phase.step_s >= phase.bound_s >= phase.compute_s


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_not_offloaded(name: str) -> None:
    result = make_plan(pose(MODELS[name], make_machine(), WORKLOAD, UNLIMITED))
    assert result.plan.offload.rules == ()
    assert result.plan.prediction.decode.link_bytes == 0
    assert result.gap == pytest.approx(1)
    assert "everything fits" in explain_plan(result)[0]


def test_one_byte_too_few_offloads_something() -> None:
    model, machine = MODELS["dense"], make_machine()
    chunked = Workload(prompt_tokens=512, output_tokens=20, context=700)
    budget = budget_for(model, machine, 1.0, chunked)
    assert plan_for(model, machine, budget, chunked).offload.rules == ()
    tight = Budget(gpu_memory=budget.gpu_memory - 200)
    assert plan_for(model, machine, tight, chunked).prediction.host_memory_bytes > 0


def test_an_embedding_on_the_host_spares_a_rule() -> None:
    """What is missing is less than the embedding: reading its rows beats moving any layer."""
    model, machine = MODELS["dense"], make_machine()
    table = input_embedding(model)
    assert table is not None
    chunked = Workload(prompt_tokens=512, output_tokens=20, context=700)
    budget = budget_for(model, machine, 1.0, chunked)
    tight = Budget(gpu_memory=budget.gpu_memory - table.nbytes // 2)
    result = make_plan(pose(model, machine, chunked, tight, Goal(packing=False)))
    plan, row = result.plan, table.nbytes // table.shape[0]
    assert (plan.offload.rules, plan.offload.embeddings) == ((), "host")
    assert plan.prediction.decode.link_bytes == row
    assert plan.prediction.prefill.link_bytes == 512 * row
    assert plan.prediction.host_memory_bytes == table.nbytes
    assert any("input embedding" in reason for reason in explain_plan(result))


def test_a_tied_embedding_stays_on_the_gpu() -> None:
    model = MODELS["dense"]
    tied = replace(model, outside=model.outside[1:])
    assert input_embedding(tied) is None
    plan = make_plan(ask(tied, make_machine(), 0.5)).plan
    assert plan.offload.embeddings == "device"


def test_a_second_rule_is_accounted_for() -> None:
    result = make_plan(ask(make_model([DENSE, MOE]), make_machine(uva=0.8e9), 0.7, SHORT))
    assert (len(result.plan.offload.rules), result.max_rules) == (2, 2)
    assert result.second_rule_gain > 1
    reasons = " ".join(explain_plan(result))
    assert f"one rule takes {100 * (result.second_rule_gain - 1):.1f} % longer" in reasons
    assert "no faster plan of up to two rules was found" in reasons
