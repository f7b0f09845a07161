"""The longest context that has a plan, and how few searches find it."""

import pytest

from offplan.errors import InfeasibleError
from offplan.plan import Goal, Workload
from offplan.planner import longest
from offplan.planner.longest import find_longest_context
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from tests.costs.builders import dense_model, make_machine, moe_model
from tests.planner.cases import ask
from tests.tiers import first_quick

LONG = 2**20
MOST_SEARCHES = 6
"""Bisection of so many tokens takes twenty."""
GOALS = {
    "latency": Goal(packing=False),
    "packed": Goal(),
    "throughput": Goal(packing=False, objective="throughput"),
    "one target": Goal(packing=False, max_ttft=1.0),
}


def ask_long(goal: Goal, batch: int, context: int = LONG) -> Question:
    """Ask for a context, with memory for one of some thousand tokens and few weights."""
    shorter = Workload(batch=batch, prompt_tokens=16, output_tokens=20, context=5000)
    question = ask(moe_model(4), make_machine(), 0.5, shorter, goal)
    return question.with_workload(context=context)


def has_plan(question: Question) -> bool:
    try:
        make_plan(question)
    except InfeasibleError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("goal", first_quick(GOALS))
def test_the_longest_context_has_a_plan_and_the_next_has_none(
    monkeypatch: pytest.MonkeyPatch, goal: str, batch: int
) -> None:
    searched: list[Searcher] = []

    def count(*asked: object) -> Searcher:
        searched.append(Searcher(*asked))  # type: ignore[arg-type]
        return searched[-1]

    question = ask_long(GOALS[goal], batch)
    monkeypatch.setattr(longest, "Searcher", count)
    found = find_longest_context(question, LONG)
    monkeypatch.undo()
    assert found is not None
    assert len(searched) <= MOST_SEARCHES
    assert has_plan(question.with_workload(context=found))
    assert not has_plan(question.with_workload(context=found + 1))


def test_the_error_names_the_longest_context() -> None:
    question = ask_long(GOALS["latency"], 1)
    with pytest.raises(InfeasibleError) as error:
        make_plan(question)
    found = find_longest_context(question, LONG)
    assert error.value.longest_context == found
    told = f"The longest context that fits is {found:,} tokens; `context={found}` plans it"
    assert str(error.value).endswith(f". {told}")
    assert told not in error.value.facts


def test_no_context_is_named_where_none_fits() -> None:
    question = ask_long(GOALS["latency"], 1).with_gpu_memory(20_000)
    assert find_longest_context(question, LONG) is None
    with pytest.raises(InfeasibleError) as error:
        make_plan(question)
    assert error.value.longest_context is None
    assert str(error.value) == error.value.facts


@pytest.mark.slow
def test_an_unreachable_target_is_no_matter_of_bytes() -> None:
    """A target that a long context alone misses is found by bisection."""
    model, machine = dense_model(6), make_machine()
    work = Workload(prompt_tokens=16, output_tokens=20, context=64)
    question = ask(model, machine, 1.5, work, GOALS["latency"])
    fast = make_plan(question).plan.prediction.decode.step_s
    goal = GOALS["latency"].model_copy(update={"max_tpot_s": 1.2 * fast})
    question = ask(model, machine, 1.5, work, goal).with_workload(context=2**14)
    found = find_longest_context(question, 2**14)
    assert found is not None
    assert 64 <= found < 2**14
    assert has_plan(question.with_workload(context=found))
    assert not has_plan(question.with_workload(context=found + 1))
