"""A question decides its plan, byte for byte, and is recorded in it."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings

from offplan.checkpoint.model import Model
from offplan.costs.compute import ModelCompute
from offplan.errors import InfeasibleError, InputError
from offplan.held.held import hold
from offplan.library.asking import pose
from offplan.machine.profile import LayerTime, dump_profile, parse_profile
from offplan.plan import Budget, Goal, Workload, dump_plan
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from tests.costs.builders import make_machine, moe_model
from tests.planner.cases import (
    MODELS,
    UNLIMITED,
    WORKLOAD,
    ask,
    budget_for,
    models,
    plan_for,
    rates,
    shares,
    workloads,
)


def test_what_cannot_be_counted_is_refused() -> None:
    # no plan need take so long: one that reads weights in place for each of 2**31 tokens would
    workload = Workload(batch=2**16, prompt_tokens=2**15, output_tokens=1, context=2**16)
    machine = make_machine(h2d=1e6, uva=1e6)
    question = pose(MODELS["dense"], machine, workload, Budget(gpu_memory=2**40))
    with pytest.raises(InputError, match=r"65536 x 32768 prompt tokens .* than can be counted"):
        make_plan(question)


def test_plan_names_model_and_machine() -> None:
    machine = make_machine()
    plan = plan_for(MODELS["moe"], machine)
    assert plan.machine.fingerprint == machine.fingerprint
    assert plan.model.source == "test/model"
    assert plan.workload == WORKLOAD


@pytest.mark.slow
@pytest.mark.parametrize(
    "goal",
    [
        Goal(),
        Goal(max_ttft=60.0, max_tpot=30.0),
        Goal(objective="throughput"),
        Goal(engine="vllm"),
    ],
)
def test_a_plan_records_its_question_and_gives_it_again(goal: Goal) -> None:
    model = moe_model(5)
    model = replace(model, config={**model.config, "architectures": ["Qwen2MoeForCausalLM"]})
    question = ask(model, make_machine(), 0.5, goal=goal, profile="my-machine")
    plan = make_plan(question).plan
    assert (plan.goal, plan.machine.profile) == (goal, "my-machine")
    assert plan.budget == question.budget
    again = ask(model, make_machine(), 0.5, goal=goal, profile="my-machine")
    assert dump_plan(make_plan(again).plan) == dump_plan(plan)
    # asked again from what the plan itself says
    recorded = pose(
        model,
        make_machine(),
        plan.workload,
        plan.budget,
        plan.goal,
        plan.offload.store,
        plan.machine.profile,
    )
    assert make_plan(recorded).plan.offload == plan.offload


def test_a_plan_for_a_second_gpu_is_of_its_link() -> None:
    machine = make_machine(peer=20e9)
    question = ask(moe_model(5), machine, 0.5, store="peer")
    plan = make_plan(question).plan
    assert plan.offload.store == question.store
    assert plan.machine.fingerprint == machine.with_store("peer").fingerprint
    assert question.planned_machine == machine.with_store("peer")


def test_machine_limits_the_budget() -> None:
    model = MODELS["dense"]
    limit = budget_for(model, make_machine(), 0.5).gpu_memory
    machine = make_machine(gpu_memory=limit, host_memory=10**9)
    plan = plan_for(model, machine, UNLIMITED)
    assert plan.budget == Budget(gpu_memory=limit, host_memory=10**9)
    assert plan.prediction.gpu_memory.total_bytes <= limit


def test_questions_that_cannot_be_asked() -> None:
    with pytest.raises(InputError, match="no engine 'abacus'"):
        plan_for(MODELS["dense"], make_machine(), goal=Goal(engine="abacus"))
    with pytest.raises(InputError, match="no engine's flags reach a second GPU"):
        ask(MODELS["dense"], make_machine(peer=1e9), 0.5, goal=Goal(engine="vllm"), store="peer")


@pytest.mark.slow
@settings(max_examples=6)
@given(models, shares, rates, workloads)
def test_a_saved_profile_gives_the_same_plan(
    model: Model, share: float, h2d: float, workload: Workload
) -> None:
    times = [
        LayerTime(
            layer=key, phase="decode", batch=1, tokens=1, context=2600, seconds=h2d / 1e15 / 3
        )
        for key in ModelCompute(hold(model), make_machine()).works
    ]
    machine = make_machine(h2d=h2d / 3, uva=h2d / 7, layer_times=times)
    question = ask(model, machine, share, workload)
    read = parse_profile(dump_profile(machine), "saved")
    assert read.fingerprint == machine.fingerprint
    try:
        plan = make_plan(question).plan
    except InfeasibleError:
        return
    assert dump_plan(make_plan(ask(model, read, share, workload)).plan) == dump_plan(plan)
    memory = plan.prediction.gpu_memory.model_dump()
    assert memory.pop("total_bytes") == sum(memory.values())


CHANGED: dict[str, Any] = {
    "machine": make_machine(h2d=3e9),
    "workload": WORKLOAD.model_copy(update={"context": 800}),
    "budget": Budget(gpu_memory=2**30),
    "goal": Goal(packing=False),
    "store": "peer",
    "no_cores": "an Arm",
}
"""Another value of each field of a question that its answers depend on, beside the model."""
NAMES = {"profile", "routing_file", "acceptance_file"}
"""Fields that name files, whose content is in other fields."""


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_changes_the_key_of_kept_answers(name: str) -> None:
    assert {each.name for each in fields(Question)} == {*CHANGED, *NAMES, "stages", "runner"}
    question = pose(MODELS["dense"], make_machine(peer=20e9), WORKLOAD, UNLIMITED)
    other = replace(question, **{name: CHANGED[name]})
    assert other.key != question.key


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"config": {**MODELS["moe"].config, "dtype": "float32"}},
        {"headers_sha256": "other"},
        {"code": "some"},
        {"generation": "other"},
    ],
)
def test_every_fact_of_a_model_changes_the_key_of_kept_answers(changes: dict[str, Any]) -> None:
    model = MODELS["moe"]
    other = replace(model, **changes)
    assert other.key != model.key
    asked = make_machine(), WORKLOAD, UNLIMITED
    assert pose(other, *asked).key != pose(model, *asked).key
