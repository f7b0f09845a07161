"""Where a plan's bottleneck changes."""

from typing import Any

import pytest

from offplan.costs import crossovers
from offplan.costs.crossovers import MOST_CHUNKS, find_crossovers
from offplan.plan import Prediction
from offplan.planner.make import make_plan
from tests.costs.builders import dense_model, make_machine, moe_model
from tests.held import hold_by, predict
from tests.planner.cases import WORKLOAD, ask


def test_crossovers_are_where_the_bottleneck_changes() -> None:
    machine = make_machine(h2d=20e9)
    model = dense_model(6)
    plan = make_plan(ask(model, machine, 0.5)).plan
    found = find_crossovers(hold_by(model, packing=plan.offload.packing), machine, plan)
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
    model = moe_model(4)
    plan = make_plan(ask(model, make_machine(), 0.5)).plan
    found = find_crossovers(hold_by(model), make_machine(h2d=20e9, uva=20e9), plan)
    assert found.streaming_batch is not None
    assert 1 < found.streaming_batch < 64


def test_where_nothing_is_read_in_place_no_batch_is_named() -> None:
    question = ask(moe_model(4), make_machine(peer=20e9), 0.5, store="peer")
    plan = make_plan(question).plan
    found = find_crossovers(question.held, question.planned_machine, plan)
    assert found.streaming_batch is None


def test_prompts_of_no_end_of_chunks_are_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, workload = (
        make_machine(h2d=1e8, uva=1e6),
        WORKLOAD.model_copy(update={"prompt_tokens": 2}),
    )
    question = ask(dense_model(6), machine, 0.5, workload)
    plan = make_plan(question).plan
    assert any(rule.prefill.streams for rule in plan.offload.rules)
    priced = []

    def price(*given: Any) -> Prediction:
        priced.append(given[2].prompt_tokens)
        return plan.prediction

    monkeypatch.setattr(crossovers, "predict", price)
    assert find_crossovers(question.held, machine, plan).hiding_prompt is None
    assert max(priced) == 2 * MOST_CHUNKS
