"""One step of each knob of a plan, priced."""

from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.open import open_model
from offplan.library.asking import ask, ask_again
from offplan.library.machines import load_machine
from offplan.plan import Goal, Plan, Workload, load_plan
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.planner.question import Question
from tests.cli import ROOT, TINY_MOE, write_plan
from tests.tiers import first_quick

SMALL = Workload(prompt_tokens=32, output_tokens=96, context=256)


def question_of(plan: Plan) -> Question:
    return ask_again(plan, model=str(TINY_MOE))


def test_no_neighbour_that_fits_is_faster_than_the_plan() -> None:
    plan = load_plan(ROOT / "plans" / "tiny-moe.yaml")
    question = question_of(plan)
    best = make_plan(question).plan
    found = find_neighbours(question, best)
    times = [each.prediction.objective_s for each in found]
    assert times == sorted(times)
    allowed = [each for each in found if each.refusal is None]
    assert allowed
    assert min(each.prediction.objective_s for each in allowed) >= best.prediction.objective_s
    assert "GPU memory" in {each.refusal for each in found}


MIXED = """\
[{cpu_offload_params: [experts], group_size: 3, num_in_group: 2, prefill: prefetch, decode: uva}, \
{max_bytes: 32 KiB, prefill: uva, decode: uva}]"""


def test_every_knob_takes_a_step(tmp_path: Path) -> None:
    plan = load_plan(write_plan(tmp_path, MIXED))
    changes = {each.change for each in find_neighbours(question_of(plan), plan)}
    assert changes >= {
        "prefetch_step 2 -> 1",
        "prefetch_step 2 -> 3",
        "prefill_chunk 8 -> 32",
        "embeddings device -> host",
        "without rule 1",
        "without rule 2",
        "rule 1: num_in_group 2 -> 1",
        "rule 1: num_in_group 2 -> 3",
        "rule 1: group_size 3 -> 2",
        "rule 1: group_size 3 -> 4",
        "rule 1: prefill prefetch -> uva",
        "rule 1: decode uva -> prefetch",
        "rule 2: max_bytes 32 KiB -> 30 KiB",
        "rule 2: max_bytes 32 KiB -> 34 KiB",
    }


@pytest.mark.parametrize(
    ("engine", "steps"),
    first_quick(
        [
            (
                "vllm",
                {
                    *("prefetch_step 2 -> 1", "prefetch_step 2 -> 3"),
                    *("rule 1: group_size 5 -> 4", "rule 1: group_size 5 -> 6"),
                    *("rule 1: num_in_group 4 -> 3", "rule 1: num_in_group 4 -> 5"),
                    "rule 1: prefill and decode prefetch -> uva",
                },
            ),
            ("sglang", {"rule 1: group_size 1 -> 2", "prefetch_step 1 -> 2"}),
        ]
    ),
)
def test_neighbours_of_an_engines_plan_are_such_as_it_can_run(engine: str, steps: set[str]) -> None:
    """By one backend, and no embedding on the host."""
    model = open_model(str(TINY_MOE))
    question = ask(model, load_machine("cpu"), SMALL, gpu_memory=33 * 2**15, engine=engine)  # type: ignore[arg-type]
    plan = make_plan(question).plan
    assert plan.goal.engine == engine
    found = {each.change for each in find_neighbours(question, plan)}
    assert found == {"without rule 1", *steps}


@pytest.mark.slow
def test_steps_of_bytes_are_those_that_an_engine_can_be_told() -> None:
    """SGLang takes whole GiB, and copies of what it does not read in place beside the plan."""
    model = open_model(str(ROOT / "tests" / "models" / "qwen3-8b" / "config.json"))
    machine = load_machine("h200-pcie5")
    question = ask(model, machine, Workload(), gpu_memory=12 * 2**30, engine="sglang")
    plan = make_plan(question).plan
    found = {each.change: each for each in find_neighbours(question, plan)}
    less = found["rule 1: max_bytes 6 GiB -> 5 GiB"]
    assert less.prediction.gpu_memory.total_bytes < plan.budget.gpu_memory
    assert less.refusal == "GPU memory"
    assert found["rule 1: max_bytes 6 GiB -> 7 GiB"].refusal is None


@pytest.mark.slow
def test_what_an_engine_page_locks_beyond_the_budget_is_refused() -> None:
    """Torch rounds each parameter up: 29 layers of 5 GiB take 6.34, and 30 take 6.56."""
    model = open_model(str(ROOT / "tests" / "models" / "qwen3-8b" / "config.json"))
    budget: dict[str, Any] = {"gpu_memory": 12 * 2**30, "host_memory": 32 * 2**30 // 5}
    question = ask(model, load_machine("h200-pcie5"), Workload(), engine="vllm", **budget)
    plan = make_plan(question).plan
    (one,) = (each for each in find_neighbours(question, plan) if "group 29 -> 30" in each.change)
    assert one.prediction.host_memory_bytes < budget["host_memory"]
    assert one.refusal == "memory of the store"


def test_a_neighbour_beyond_a_target_says_so() -> None:
    plan = load_plan(ROOT / "plans" / "tiny-moe.yaml")
    tight = Goal(max_tpot=plan.prediction.decode.step_s * 1.001)
    plan = plan.model_copy(update={"goal": tight})
    refusals = {each.refusal for each in find_neighbours(question_of(plan), plan)}
    assert "--max-tpot" in refusals
