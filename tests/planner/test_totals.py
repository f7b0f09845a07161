"""What is found beside what a wider search found, which passed over hardly any plan."""

from collections.abc import Sequence
from statistics import median

import pytest

from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.planner.find import ALIKE
from offplan.planner.make import make_plan
from tests.planner.totals import Total, read, read_totals
from tests.tiers import choose_each_value_once, others_in_sweep


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_what_is_found_is_as_fast_as_a_wider_search_found(everything: bool) -> None:
    """Of questions with each model, machine, size of a request and way of packing, or of all."""
    totals, ratios = read_totals(), []
    if not everything:
        totals = _choose(totals)
    for total in totals:
        result = make_plan(total.ask())
        ratios.append(result.best_s / total.least_s)
        assert result.plan.prediction.objective_s <= ALIKE * result.best_s * (1 + 1e-12)
    assert max(ratios) <= 1.005
    # a plan that is faster was priced otherwise: python -m tests.planner.totals
    assert min(ratios) == pytest.approx(1, rel=1e-9)
    assert median(ratios) == pytest.approx(1, rel=1e-9)


def _choose(totals: Sequence[Total]) -> list[Total]:
    """Choose a question with each value: budgets and contexts are of one question each."""
    left_out = {Total._fields.index(name) for name in ("gpu_memory", "context", "least_s")}
    listed = [
        tuple(value for number, value in enumerate(total) if number not in left_out)
        for total in totals
    ]
    return [totals[number] for number in choose_each_value_once(listed)]


@pytest.mark.parametrize(
    ("name", "machine"),
    others_in_sweep([("qwen3-8b", "a10"), ("deepseek-v2-lite", "rtx4090")], [("qwen3-8b", "a10")]),
)
@pytest.mark.slow
def test_more_memory_is_never_slower_for_a_real_model(name: str, machine: str) -> None:
    model = read(f"tests/models/{name}/config.json")
    times = [
        make_plan(ask(model, load_machine(machine), gpu_memory=gib * 2**30)).best_s
        for gib in (4, 5, 6, 7, 8, 10, 12, 16)
    ]
    assert times == sorted(times, reverse=True)
