"""Where no plan fits: how much is missing, of which memory."""

from dataclasses import replace

import pytest

from offplan.errors import InfeasibleError
from offplan.plan import Budget, Goal
from offplan.planner.candidates import Candidates, Ints
from offplan.planner.infeasible import RESOLUTION
from offplan.planner.make import make_plan
from offplan.planner.prices import Prices
from tests.costs.builders import DENSE, MOE, make_machine, make_model
from tests.engines.builders import deepseek, qwen3
from tests.planner.cases import MODELS, ask, budget_for, plan_for
from tests.tiers import first_quick


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(MODELS))
def test_shortfall_is_exactly_what_is_missing(name: str) -> None:
    model, machine = MODELS[name], make_machine()
    tight = Budget(gpu_memory=200_000)
    with pytest.raises(InfeasibleError, match="no plan fits") as error:
        plan_for(model, machine, tight)
    assert error.value.shortfall_bytes is not None
    enough = tight.gpu_memory + error.value.shortfall_bytes
    plan_for(model, machine, Budget(gpu_memory=enough + 2))
    with pytest.raises(InfeasibleError):
        plan_for(model, machine, Budget(gpu_memory=enough - 10))


def test_host_memory_is_kept() -> None:
    model, machine = MODELS["dense"], make_machine()
    budget = budget_for(model, machine, 0.5)
    needed = plan_for(model, machine, budget).prediction.host_memory_bytes
    limited = Budget(gpu_memory=budget.gpu_memory, host_memory=needed // 3)
    with pytest.raises(InfeasibleError, match="host memory") as error:
        plan_for(model, machine, limited)
    assert error.value.shortfall_bytes is not None
    assert 0 < error.value.shortfall_bytes < needed
    room = needed // 3 + error.value.shortfall_bytes
    roomy = Budget(gpu_memory=budget.gpu_memory, host_memory=room)
    assert plan_for(model, machine, roomy).prediction.host_memory_bytes <= room


@pytest.mark.slow
def test_plans_that_the_host_has_no_room_for_are_not_weighed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That no plan fits is told by counting bytes, and not by trying each pair of rules."""
    model, machine = make_model([DENSE, MOE] * 4), make_machine()
    budget = budget_for(model, machine, 0.5)
    needed = plan_for(model, machine, budget).prediction.host_memory_bytes
    weighed, number_all = [0], Prices.number_all

    def count(prices: Prices, candidates: Candidates) -> Ints:
        weighed[0] += len(candidates.setting)
        return number_all(prices, candidates)

    monkeypatch.setattr(Prices, "number_all", count)
    plan_for(model, machine, budget)
    of_plan, weighed[0] = weighed[0], 0
    limited = budget.model_copy(update={"host_memory": 3 * needed // 5})
    with pytest.raises(InfeasibleError, match="host memory"):
        plan_for(model, machine, limited)
    assert weighed[0] <= of_plan


def test_the_second_gpu_limits_the_store() -> None:
    model, machine = MODELS["dense"], make_machine(peer=20e9, host_memory=1)
    budget = budget_for(model, machine, 0.3)
    assert plan_for(model, machine, budget, store="peer").budget.host_memory == 2**40
    with pytest.raises(InfeasibleError, match="no plan fits 1 B of peer memory"):
        plan_for(model, machine, budget.model_copy(update={"host_memory": 1}), store="peer")


@pytest.mark.slow
@pytest.mark.parametrize(("share", "moves"), [(0.3, True), (0.9, True), (0.3, False)])
def test_an_engine_may_need_more_than_others(share: float, moves: bool) -> None:
    """SGLang copies experts through several buffers; of what it does not know vLLM moves none."""
    model = deepseek(5) if moves else replace(qwen3(), config={"architectures": ["Unknown"]})
    machine, goal = make_machine(gpu_memory=2**40), Goal(engine="sglang" if moves else "vllm")
    question = ask(model, machine, share, goal=goal)
    with pytest.raises(InfeasibleError, match=r"can run fits .* others do; with") as error:
        make_plan(question)
    lack, given = error.value.shortfall_bytes, question.budget.gpu_memory
    assert lack is not None
    assert make_plan(question.with_gpu_memory(given + lack)).plan.goal == goal
    with pytest.raises(InfeasibleError):
        make_plan(question.with_gpu_memory(given + lack - given // RESOLUTION - 1))
    assert ("offplan does not know how vLLM builds" in str(error.value)) is not moves


def test_a_machine_may_be_too_small_for_an_engine() -> None:
    question = ask(deepseek(3), make_machine(), 0.3, goal=Goal(engine="sglang"))
    machine = make_machine(gpu_memory=question.budget.gpu_memory)
    with pytest.raises(InfeasibleError, match=r"can run fits .* others do: SGLang prefetches"):
        make_plan(replace(question, machine=machine))
