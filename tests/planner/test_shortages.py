"""Memory of a budget that a plan leaves unused."""

import json

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.plan import Workload
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.unused import Unused, find_unused
from tests.cli import CLI, ROOT

CONFIG = ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json"
GIB = 2**30
ASKED = ("--machine", "rtx3090", "--gpu-memory", "4GiB", "--no-packing", "--parts", "off")
LONG = Workload(prompt_tokens=2048, context=2304)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(CONFIG))


def ask_for(
    model: Model, workload: Workload, name: str = "rtx3090", memory: int = 4 * GIB
) -> Question:
    machine = load_machine(name)
    return ask(model, machine, workload, gpu_memory=memory, packing=False, parts="off")


def test_a_plan_that_offloads_nothing_lacks_nothing(model: Model) -> None:
    question = ask_for(model, LONG, "h200", 60 * GIB)
    plan = make_plan(question).plan
    assert not plan.offload.rules
    assert find_unused(question, plan) is None


def test_memory_that_no_part_fits_stays_unused(model: Model) -> None:
    question = ask_for(model, LONG)
    plan = make_plan(question).plan
    unused = find_unused(question, plan)
    free = 4 * GIB - plan.prediction.gpu_memory.total_bytes
    expert_bytes = 64 * 2048 * 1408 * 2
    name = "mlp.experts.down_proj.weight"
    assert unused == Unused(free, name, expert_bytes, expert_bytes)
    assert 0.03 * 4 * GIB < free < expert_bytes
    fuller = question.with_gpu_memory(plan.prediction.gpu_memory.total_bytes)
    assert find_unused(fuller, make_plan(fuller).plan) is None


@pytest.mark.slow
def test_the_answer_says_so(cli: CLI) -> None:
    long = ("--prompt-tokens", 2048, "--context", 2304)
    told = " ".join(cli("plan", CONFIG, *ASKED, *long).err.split())
    assert (
        "241.3 MiB of the budget (5.9%) stay unused: the smallest part that is offloaded, "
        "mlp.experts.down_proj.weight of a layer, takes 352 MiB." in told
    )
    crowded = ("--batch", 12, "--prompt-tokens", 2048, "--context", 4096)
    told = " ".join(cli("analyze", CONFIG, *ASKED, *crowded).out.split())
    assert (
        "130.1 MiB of the budget "
        "(3.2%) stay unused: no plan that was searched takes more of it and is faster; one more "
        "slot, for all that a layer streams, takes 411.3 MiB." in told
    )
    for command in ("plan", "analyze"):
        data = json.loads(cli(command, CONFIG, *ASKED, *crowded, "--json").out)
        assert data["unused"]["smallest_bytes"] < data["unused"]["unused_bytes"]
        data = json.loads(cli(command, CONFIG, *ASKED, "--gpu-memory", "24GiB", "--json").out)
        assert data["unused"] is None
