"""Where memory is too small: prompts that read weights again and again, memory left unused."""

import json
from dataclasses import replace

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.plan import Goal, Plan, Workload
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.rereads import ONCE, WORTH_TELLING, Rereads, find_rereads
from offplan.planner.unused import Unused, find_unused
from tests.cli import CLI, ROOT

CONFIG = ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json"
GIB = 2**30
ASKED = ("--machine", "rtx3090", "--gpu-memory", "4GiB", "--no-packing", "--parts", "off")
LONG = Workload(prompt_tokens=2048, context=2304)
BATCHED = Workload(batch=12, prompt_tokens=2048, context=4096)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(CONFIG))


def ask_for(
    model: Model, workload: Workload, name: str = "rtx3090", memory: int = 4 * GIB
) -> Question:
    machine = load_machine(name)
    return ask(model, machine, workload, gpu_memory=memory, packing=False, parts="off")


def count_reads(plan: Plan) -> float:
    """Bytes that the prompt brings, over those in host memory: an embedding's are hardly any."""
    return plan.prediction.prefill.link_bytes / plan.prediction.host_memory_bytes


@pytest.mark.slow
def test_each_remedy_has_the_prompt_read_weights_once(model: Model) -> None:
    question = ask_for(model, BATCHED)
    plan = make_plan(question).plan
    found = find_rereads(question, plan)
    assert found is not None
    assert found.num_reads == pytest.approx(count_reads(plan), rel=0.1)
    assert found.num_reads > WORTH_TELLING
    assert found.batch is not None
    assert found.context is not None
    assert found.more_gpu_bytes is not None
    assert BATCHED.prompt_tokens + BATCHED.output_tokens <= found.context < BATCHED.context
    for asked in (
        question.with_workload(batch=found.batch),
        question.with_workload(context=found.context),
        question.with_gpu_memory(4 * GIB + found.more_gpu_bytes),
    ):
        better = make_plan(asked).plan
        assert count_reads(better) < ONCE
        assert better.prediction.prefill.step_s < 0.7 * plan.prediction.prefill.step_s
        assert find_rereads(asked, better) is None


@pytest.mark.slow
def test_remedies_beyond_the_machine_are_found_and_no_batch_where_it_is_chosen(
    model: Model,
) -> None:
    """More memory than the machine has: a question takes none of it, the search does."""
    question = ask_for(model, BATCHED)
    machine = question.machine
    memory = machine.gpu_memory.model_copy(update={"value": 4 * GIB})
    small = replace(question, machine=machine.model_copy(update={"gpu_memory": memory}))
    found, alike = (find_rereads(each, make_plan(each).plan) for each in (question, small))
    assert found == alike
    plan = make_plan(question).plan
    goal = Goal(objective="throughput", packing=False)
    told = find_rereads(replace(question, goal=goal), plan)
    assert found is not None
    assert told == Rereads(found.num_reads, None, None, None)


def test_a_prompt_that_reads_once_is_none(model: Model) -> None:
    question = ask_for(model, LONG)
    assert find_rereads(question, make_plan(question).plan) is None


def test_a_plan_that_offloads_nothing_lacks_nothing(model: Model) -> None:
    question = ask_for(model, LONG, "h200", 60 * GIB)
    plan = make_plan(question).plan
    assert not plan.offload.rules
    assert find_rereads(question, plan) is find_unused(question, plan) is None


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
        "The prompt reads weights 10 times over the link; with a batch of 6, a context of 2416 "
        "tokens or 640 MiB more of GPU memory it would read them once. 130.1 MiB of the budget "
        "(3.2%) stay unused: no plan that was searched takes more of it and is faster; one more "
        "slot, for all that a layer streams, takes 411.3 MiB." in told
    )
    keys = {"num_reads", "batch", "context", "more_gpu_bytes"}
    for command in ("plan", "analyze"):
        data = json.loads(cli(command, CONFIG, *ASKED, *crowded, "--json").out)
        assert data["rereads"].keys() == keys
        assert data["rereads"]["more_gpu_bytes"] == 640 * 2**20
        assert data["unused"]["smallest_bytes"] < data["unused"]["unused_bytes"]
        data = json.loads(cli(command, CONFIG, *ASKED, "--gpu-memory", "24GiB", "--json").out)
        assert data["rereads"] is data["unused"] is None
