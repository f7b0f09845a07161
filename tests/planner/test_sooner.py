"""What a first token that comes much sooner would cost."""

from dataclasses import replace

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.timeline import PS_PER_S
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.plan import Plan
from offplan.planner.aims import Fastest, limits_ps
from offplan.planner.make import make_plan
from offplan.planner.packed import find_best
from offplan.planner.search import Searcher
from offplan.planner.sooner import HARDLY_MORE, WORTH_TELLING, find_sooner
from offplan.planner.space import Space
from tests.cli import CLI, ROOT

CONFIG = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"
GIB = 2**30


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(CONFIG))


def plan_twice(model: Model, gib: int, max_ttft_s: float | None = None) -> tuple[Plan, Plan | None]:
    machine = load_machine("rtx4090")
    memory = gib * GIB
    question = ask(model, machine, gpu_memory=memory, max_ttft_s=max_ttft_s, packing=False)
    result = make_plan(question)
    return result.plan, find_sooner(question, result)


def test_a_much_sooner_first_token_for_hardly_more(model: Model) -> None:
    plan, sooner = plan_twice(model, 9)
    assert sooner is not None
    before, after = plan.prediction, sooner.prediction
    # the target is rounded to two digits
    assert after.prefill.step_s < 1.05 * before.prefill.step_s / WORTH_TELLING
    assert before.objective_s < after.objective_s < HARDLY_MORE * before.objective_s
    assert plan_twice(model, 9, sooner.goal.max_ttft_s)[1] is None


def test_one_that_two_rules_alone_make(model: Model) -> None:
    """No plan of one rule has its first token as soon for as little."""
    machine = load_machine("rtx4090")
    question = ask(model, machine, gpu_memory=10 * GIB, packing=False)
    result = make_plan(question)
    sooner = find_sooner(question, result)
    assert sooner is not None
    assert len(sooner.offload.rules) == 2
    before, after = result.plan.prediction, sooner.prediction
    assert before.objective_s < after.objective_s < HARDLY_MORE * before.objective_s
    asked = replace(question, goal=sooner.goal)
    searcher, limits = Searcher(Space(asked)), limits_ps(sooner.goal)
    aim = Fastest(searcher.space.weights, limits)
    best = find_best(searcher, asked.budget, aim, max_rules=1).best
    assert best is None or best.value > HARDLY_MORE * PS_PER_S * before.objective_s


def test_none_where_everything_fits(model: Model) -> None:
    assert plan_twice(model, 23)[1] is None


@pytest.mark.slow
def test_the_answer_says_so(cli: CLI) -> None:
    asked = ("analyze", CONFIG, "--machine", "rtx4090", "--gpu-memory", "9GiB", "--no-packing")
    assert "takes 1.5% longer in all: --max-ttft 520ms" in " ".join(cli(*asked).out.split())
