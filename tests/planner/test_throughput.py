"""The batch that gives most tokens a second."""

from contextlib import suppress
from dataclasses import replace

import pytest

from offplan.checkpoint.open import open_model
from offplan.errors import InfeasibleError
from offplan.library.asking import ask as ask_of
from offplan.library.machines import load_machine
from offplan.plan import Goal, Workload
from offplan.planner.find import ALIKE, plan_throughput, tokens_per_s
from offplan.planner.make import make_plan
from offplan.report.explain import explain_plan
from tests.cli import ROOT
from tests.costs.builders import dense_model, make_machine, moe_model
from tests.planner.cases import ask
from tests.tiers import others_in_sweep

MODEL, MACHINE = moe_model(4), make_machine()
EIGHT = Workload(batch=8, prompt_tokens=16, output_tokens=20, context=64)
MOST = Goal(objective="throughput")


@pytest.mark.slow
def test_throughput_chooses_the_batch_that_gives_most() -> None:
    question = ask(MODEL, MACHINE, 0.7, EIGHT, MOST)
    best = make_plan(question)
    latency = ask(MODEL, MACHINE, 0.7, EIGHT, Goal())
    plans = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        try:
            plans.append(make_plan(latency.with_workload(batch=batch)).plan)
        except InfeasibleError:
            break
    rate = best.plan.workload.batch * best.plan.workload.output_tokens / best.best_s
    assert rate > max(map(tokens_per_s, plans)), "one between powers is better"
    assert best.plan.goal == MOST
    assert "tokens/s" in explain_plan(best)[-1]
    assert plan_throughput(question) == best
    # the plan is the best one of its batch
    chosen = make_plan(latency.with_workload(batch=best.plan.workload.batch)).plan
    assert (chosen.offload, chosen.prediction) == (best.plan.offload, best.plan.prediction)


@pytest.mark.slow
@pytest.mark.parametrize("room", others_in_sweep([-0.15, -0.05], [-0.05]))
def test_batches_that_fit_with_a_packed_head_alone_are_tried(room: float) -> None:
    model, machine = dense_model(4), make_machine(h2d=1e9, uva=0.9e9)
    question = ask(model, machine, room, EIGHT, MOST)
    best, plans = make_plan(question).plan, []
    for batch in range(1, 2 * best.workload.batch + 9):
        sized = replace(question, goal=Goal()).with_workload(batch=batch)
        with suppress(InfeasibleError):
            plans.append(make_plan(sized).plan)
    assert ALIKE * tokens_per_s(best) >= max(map(tokens_per_s, plans))


@pytest.mark.slow
def test_throughput_keeps_targets() -> None:
    free = make_plan(ask(MODEL, MACHINE, 0.7, EIGHT, MOST)).plan
    goal = Goal(objective="throughput", max_tpot=0.8 * free.prediction.decode.step_s)
    kept = make_plan(ask(MODEL, MACHINE, 0.7, EIGHT, goal)).plan
    assert goal.max_tpot_s is not None
    assert kept.prediction.decode.step_s <= goal.max_tpot_s
    assert tokens_per_s(kept) <= tokens_per_s(free)
    assert kept.workload.batch < free.workload.batch


@pytest.mark.slow
def test_batches_that_pay_again_are_found_between_powers() -> None:
    """From 9 texts on kernels for many rows take over, and 32 texts miss the target."""
    model = open_model(str(ROOT / "benchmarks" / "models" / "gpt-oss-20b" / "config.json"))
    workload = Workload(batch=1, prompt_tokens=512, output_tokens=128, context=4096)
    machine, target = load_machine("rtx4090,ram=64GiB"), 0.035
    most = make_plan(
        ask_of(model, machine, workload, objective="throughput", max_tpot_s=target)
    ).plan
    others = [
        make_plan(
            ask_of(model, machine, workload.model_copy(update={"batch": batch}), max_tpot_s=target)
        ).plan
        for batch in (8, 16, 24, 28)
    ]
    assert ALIKE * tokens_per_s(most) >= max(map(tokens_per_s, others))


@pytest.mark.slow
def test_where_no_batch_fits_or_keeps_the_targets_a_single_sequence_says_why() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        make_plan(ask(MODEL, MACHINE, 0.7, EIGHT, MOST).with_gpu_memory(10_000))
    goal = Goal(objective="throughput", max_tpot=1e-9)
    with pytest.raises(InfeasibleError, match="no plan reaches --max-tpot"):
        make_plan(ask(MODEL, MACHINE, 0.7, EIGHT, goal))
