"""Answers beside the plan: targets, the best batch, crossovers, the frontier."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offplan.planner.targets import Targets

from offplan.checkpoint.model import Model
from offplan.cli.options import Engine, Store
from offplan.cli.planning import restrict_to
from offplan.costs.crossovers import find_crossovers
from offplan.costs.predict import predict
from offplan.engines.export import export_plan
from offplan.errors import InfeasibleError
from offplan.plan import Budget, Plan, Workload
from offplan.planner import make_plan
from offplan.planner.frontier import find_frontier
from offplan.planner.throughput import plan_throughput, tokens_per_s
from offplan.report.frontier import render_frontier
from tests.cli import CLI, TINY_MOE
from tests.costs.builders import dense_model, make_machine, moe_model
from tests.engines.builders import deepseek, qwen3
from tests.test_cli_report import show
from tests.test_planner import WORKLOAD, budget_for, price_everything

MODEL, MACHINE = moe_model(4), make_machine()
BUDGET = budget_for(MODEL, MACHINE, 0.5)


def fastest() -> Plan:
    return make_plan(MODEL, MACHINE, WORKLOAD, BUDGET).plan


def test_targets_that_are_kept_change_nothing() -> None:
    targets = Targets(max_ttft_s=60.0, max_tpot_s=60.0)
    assert make_plan(MODEL, MACHINE, WORKLOAD, BUDGET, targets).plan == fastest()


def test_a_target_out_of_reach_names_the_nearest_and_the_memory_that_does() -> None:
    target = Targets(max_tpot_s=fastest().prediction.decode.step_s / 3)
    with pytest.raises(InfeasibleError, match="no plan reaches --max-tpot") as error:
        make_plan(MODEL, make_machine(gpu_memory=2**23), WORKLOAD, BUDGET, target)
    assert error.value.shortfall_bytes is not None
    enough = Budget(gpu_memory=BUDGET.gpu_memory + error.value.shortfall_bytes)
    plan = make_plan(MODEL, MACHINE, WORKLOAD, enough, target).plan
    assert target.max_tpot_s is not None
    assert plan.prediction.decode.step_s <= target.max_tpot_s


def test_throughput_chooses_the_batch_that_gives_most() -> None:
    workload = Workload(prompt_tokens=16, output_tokens=20, context=64)
    budget = budget_for(MODEL, MACHINE, 0.7, workload.model_copy(update={"batch": 8}))
    best = plan_throughput(MODEL, MACHINE, workload, budget, Targets())
    plans = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        sized = workload.model_copy(update={"batch": batch})
        try:
            plans.append(make_plan(MODEL, MACHINE, sized, budget).plan)
        except InfeasibleError:
            break
    assert tokens_per_s(best.plan) > max(map(tokens_per_s, plans)), "one between powers is better"
    assert "tokens/s" in best.reasons[-1]


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(Engine),
    st.sampled_from([deepseek(), qwen3()]),
    st.floats(0.1, 1.0),
    st.sampled_from([1e8, 5e9, 50e9]),
)
def test_a_plan_for_an_engine_can_be_exported(
    engine: Engine, model: Model, share: float, h2d: float
) -> None:
    machine = make_machine(h2d=h2d, uva=0.9 * h2d)
    budget = budget_for(model, machine, share)
    restriction = restrict_to(engine, Store.HOST, model)
    free = make_plan(model, machine, WORKLOAD, budget).plan.prediction.objective_s
    try:
        result = make_plan(model, machine, WORKLOAD, budget, restriction=restriction)
    except InfeasibleError:
        assert engine is Engine.SGLANG
        assert model.experts is not None, "of such models it moves nothing else"
        return
    export_plan(result.plan, model, engine.value)
    assert result.plan.prediction.objective_s >= free
    assert f"only plans that {engine.value} can run were searched" in result.reasons


def test_the_fastest_of_an_engine_is_found() -> None:
    """As if every plan of one rule were looked at, and those left out that do not export."""
    model, machine = deepseek(3), make_machine()
    restriction = restrict_to(Engine.VLLM, Store.HOST, model)
    budget = budget_for(model, machine, 0.5)
    kept = [
        prediction.objective_s
        for offload, prediction in price_everything(model, machine, WORKLOAD, budget)
        if offload.embeddings == "device" and restriction.allows(offload)
    ]
    plan = make_plan(model, machine, WORKLOAD, budget, restriction=restriction).plan
    assert plan.prediction.objective_s == pytest.approx(min(kept), rel=1e-12)


def test_crossovers_are_where_the_bottleneck_changes() -> None:
    machine = make_machine(h2d=20e9)
    model = dense_model(6)
    plan = make_plan(model, machine, WORKLOAD, budget_for(model, machine, 0.5)).plan
    found = find_crossovers(model, machine, plan)
    assert found.streaming_batch is None, "there are no experts"
    for name, phase, number in (
        ("batch", "decode", found.compute_bound_batch),
        ("prompt_tokens", "prefill", found.hiding_prompt),
    ):
        assert number is not None
        for at, holds in ((number, True), (number - 1, False)):
            if at < 1:
                continue
            workload = WORKLOAD.model_copy(update={name: at})
            prediction = getattr(
                predict(model, machine, workload, plan.budget, plan.offload), phase
            )
            assert (prediction.compute_s >= prediction.link_s) is holds


def test_experts_are_streamed_from_some_batch_on() -> None:
    plan = fastest()
    found = find_crossovers(MODEL, make_machine(h2d=20e9, uva=20e9), plan)
    assert found.streaming_batch is not None
    assert 1 < found.streaming_batch < 64


def test_frontier_goes_from_the_least_to_all() -> None:
    points = find_frontier(MODEL, MACHINE, WORKLOAD, Budget(gpu_memory=2**40))
    budgets = [point.plan.budget.gpu_memory for point in points]
    times = [point.plan.prediction.objective_s for point in points]
    assert budgets == sorted(budgets)
    assert points[-1].plan.offload.rules == ()
    assert points[-1].plan.prediction.host_memory_bytes == 0
    assert all(later <= sooner * 1.006 for sooner, later in pairwise(times))
    lines = show(render_frontier(points)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("█" in line for line in lines) == len(points)


def test_a_frontier_may_be_one_point() -> None:
    """As where a small model takes hardly anything beside the overhead."""
    machine = make_machine(gpu_memory=2**41)
    overhead = machine.gpu_overhead.model_copy(update={"value": 2**40})
    machine = machine.model_copy(update={"gpu_overhead": overhead})
    points = find_frontier(MODEL, machine, WORKLOAD, Budget(gpu_memory=2**41))
    assert [point.saved_per_gib_s for point in points] == [None]


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cli = CLI(monkeypatch, capsys)
    small = ("--machine", "cpu", "--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
    plan = ("plan", TINY_MOE, *small, "--gpu-memory", "1MiB")
    code, out, err = cli(*plan, "--max-tpot", "1us")
    assert (code, out) == (3, "")
    assert "no plan reaches --max-tpot 1 us" in err
    assert json.loads(cli(*plan, "--max-tpot", "1s", "--max-ttft", "1s", "--json").out)["offload"]
    assert cli(*plan, "--max-tpot", "soon").code == 2
    data = json.loads(cli(*plan, "--objective", "throughput", "--json").out)
    assert data["workload"]["batch"] >= 1
    kept = json.loads(cli(*plan, "--objective", "throughput", "--batch", 1, "--json").out)
    assert kept["workload"]["batch"] == 1
    points = json.loads(cli(*plan, "--frontier", "--json").out)["frontier"]
    assert points[0]["objective_s"] >= points[-1]["objective_s"]
    assert "Frontier" in cli(*plan, "--frontier").out
    assert cli(*plan, "--frontier", "-o", "plan.yaml").code == 2
    assert cli(*plan, "--frontier", "--max-tpot", "1s").code == 2
    ours = json.loads(cli(*plan, "--for", "vllm", "--json").out)
    assert len(ours["offload"]["rules"]) == 1
    why = json.loads(cli("analyze", *plan[1:], "--for", "vllm", "--json").out)["why"]
    assert "only plans that vllm can run were searched" in why["reasons"]
