"""What is found beside what an exhaustive search found, which proved that no plan was faster."""

import json
from functools import cache
from statistics import median

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.plan import Workload
from offplan.planner.find import ALIKE
from offplan.planner.make import make_plan
from tests.cli import ROOT
from tests.tiers import choose_each_value_once, others_in_sweep

TOTALS = ROOT / "tests" / "planner" / "totals.json"
"""Questions about real models, with the seconds of the fastest plan of up to two rules."""


@cache
def read(name: str) -> Model:
    return open_model(str(ROOT / name))


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_what_is_found_is_as_fast_as_an_exhaustive_search_found(everything: bool) -> None:
    """Of questions with each model, machine, size of a request and way of packing, or of all."""
    questions, ratios = json.loads(TOTALS.read_text()), []
    if not everything:
        # budgets and contexts are of one question each
        listed = [(*each[:2], *each[3:6], each[7]) for each in questions]
        questions = [questions[number] for number in choose_each_value_once(listed)]
    for name, machine, memory, batch, prompt, output, context, packing, least_s in questions:
        workload = Workload(
            batch=batch, prompt_tokens=prompt, output_tokens=output, context=context
        )
        asked = {"gpu_memory": memory, "packing": packing, "host_cores": False}
        result = make_plan(ask(read(name), load_machine(machine), workload, **asked))
        ratios.append(result.best_s / least_s)
        assert result.plan.prediction.objective_s <= ALIKE * result.best_s * (1 + 1e-12)
    assert max(ratios) <= 1.005
    # prompts that make values of experts are priced lower than when the totals were found
    assert median(ratios) <= 1 + 1e-9
    assert sum(ratio == pytest.approx(1, rel=1e-9) for ratio in ratios) >= len(ratios) / 3


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
