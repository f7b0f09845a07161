"""A plan's figures agree with each other, and an edit of one of them is found without headers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import InfeasibleError, InputError
from offplan.library.asking import ask as ask_library
from offplan.library.machines import load_machine
from offplan.plan import Goal, Plan, Workload, dump_plan, load_plan, parse_plan
from offplan.planner.make import make_plan
from offplan.records import load_yaml
from offplan.upkeep.figures import list_contradictions
from tests.cli import CLI, ROOT
from tests.costs.builders import make_machine
from tests.planner.cases import ask, models, rates, shares, workloads
from tests.tiers import first_quick, others_in_sweep

PLANS = sorted((ROOT / "plans").glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_agrees_with_itself(path: Path) -> None:
    assert list_contradictions(load_plan(path)) == ()


@pytest.fixture(scope="module", autouse=True)
def planned_unasked() -> Iterator[None]:
    """Nobody asks whether transformers would run a model: figures are the same for all passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offplan.library.asking.suit", lambda goal, *_: goal)
        yield


def printed(plan: Plan) -> Plan:
    return parse_plan(load_yaml(dump_plan(plan)), "plan", in_any_budget=True)


GOALS = [
    Goal(packing=False),
    Goal(),
    Goal(packing=False, cached_experts="auto", parts="auto"),
    Goal(packing=False, host_cores=True, cached_experts="auto"),
    Goal(packing=False, max_ttft=1e9, max_tpot=1e9),
]


@pytest.mark.slow
@given(model=models, share=shares, rate=rates, workload=workloads, goal=st.sampled_from(GOALS))
@settings(max_examples=10)
def test_a_plan_that_was_made_agrees_with_itself(
    model: Model, share: float, rate: float, workload: Workload, goal: Goal
) -> None:
    if model.experts is None:
        goal = goal.model_copy(update={"cached_experts": "off", "parts": "off"})
    if workload.batch > 1 and goal.cached_experts != "off":
        workload = workload.model_copy(update={"batch": 1})
    machine = make_machine(h2d=rate, uva=0.8 * rate, host_memory=2**40)
    try:
        plan = make_plan(ask(model, machine, share, workload, goal)).plan
    except InfeasibleError:
        return
    assert list_contradictions(plan) == ()
    assert list_contradictions(printed(plan)) == ()


WAYS: list[dict[str, Any]] = [{}, {"host_cores": True}, {"engine": "vllm"}, {"engine": "sglang"}]
REAL = json.loads((ROOT / "tests" / "planner" / "totals.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("number", others_in_sweep(range(len(REAL)), range(1, len(REAL), 5)))
def test_a_plan_of_a_real_model_agrees_with_itself(number: int) -> None:
    name, machine, memory, batch, prompt, output, context, *_ = REAL[number]
    workload = Workload(batch=batch, prompt_tokens=prompt, output_tokens=output, context=context)
    asked = open_model(ROOT / name), load_machine(f"{machine},ram=96GiB"), workload
    try:
        plan = make_plan(ask_library(*asked, gpu_memory=memory, **WAYS[number % len(WAYS)])).plan
    except (InfeasibleError, InputError):
        return
    assert list_contradictions(plan) == ()
    assert list_contradictions(printed(plan)) == ()


TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")
EDITS = {
    "a total below its terms": ("total: 1018 KiB", "total: 918 KiB"),
    "a total above its terms": ("total: 1018 KiB", "total: 1020 KiB"),
    "a term": ("resident: 761.2 KiB", "resident: 700 KiB"),
    "overhead below the margin": (
        "overhead: 3.072 KiB, total: 1018 KiB",
        "overhead: 2 KiB, total: 1017 KiB",
    ),
    "a step": ("step: 2.427 ms", "step: 1 us"),
    "a step and the objective": ("step: 2.427 ms, compute: 2.427 ms", "step: 1 us, compute: 1 us"),
    "compute below its bound": ("compute: 2.427 ms", "compute: 2.4 ms"),
    "a bound above the step": ("bound: 2.427 ms", "bound: 3 ms"),
    "the objective": ("objective: 233 ms", "objective: 200 ms"),
    "output tokens": ("output_tokens: 96", "output_tokens: 90"),
    "a target": ("{objective: latency,", "{objective: latency, max_tpot: 1 ms,"),
    "bytes over the link": ("link_bytes: 96 KiB}\n  decode", "link_bytes: 960 KiB}\n  decode"),
    "no ring": ("resident: 761.2 KiB, ring: 32 KiB", "resident: 793.2 KiB, ring: 0 B"),
    "nothing on the host": ("host_memory: 96 KiB", "host_memory: 0 B"),
    "no rules": (re.search(r"rules:\n.*\n", TEXT)[0], "rules: []\n"),  # type: ignore[index]
}


@pytest.mark.parametrize("name", first_quick(EDITS))
def test_an_edit_is_found_without_the_model(cli: CLI, tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.yaml"
    text = TEXT.replace("source: tiny-moe", "source: nobody/has-this-model")
    path.write_text(text, "utf-8")
    assert cli("check", path, "--file-only").code == 0
    before, after = EDITS[name]
    assert before in text
    path.write_text(text.replace(before, after, 1), "utf-8")
    code, out, _ = cli("check", path, "--file-only")
    assert (code, "DRIFT     figures" in out) == (4, True), out


def test_a_budget_that_is_exceeded_is_found_without_the_model(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    text = TEXT.replace("source: tiny-moe", "source: nobody/has-this-model")
    path.write_text(text.replace("gpu_memory: 1 MiB", "gpu_memory: 1000 KiB"), "utf-8")
    code, out, _ = cli("check", path, "--file-only")
    assert (code, "NO ROOM   prediction" in out) == (3, True), out


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("h2d: 10 GB/s", "h2d: 99 GB/s", "h2d 99 GB/s -> 10 GB/s"),
        ("basis: estimated\n  finger", "basis: measured\n  finger", "basis measured -> estimated"),
    ],
)
def test_figures_of_a_machine_that_its_profile_does_not_have(
    cli: CLI, tmp_path: Path, before: str, after: str, told: str
) -> None:
    path = tmp_path / "plan.yaml"
    text = TEXT.replace("source: tiny-moe", "source: nobody/has-this-model")
    assert before in text
    path.write_text(text.replace(before, after), "utf-8")
    code, out, _ = cli("check", path, "--file-only")
    assert (code, told in " ".join(out.split())) == (4, True), out


def test_what_is_not_told_fails_a_strict_check(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    text = TEXT.replace("source: tiny-moe", "source: nobody/has-this-model")
    path.write_text(text, "utf-8")
    code, _, err = cli("check", path, "--file-only", "--strict")
    assert (code, err) == (1, f"offplan: not told: {path}\n")
    whole = ROOT / "plans" / "tiny-moe.yaml"
    assert cli("check", whole, "--file-only", "--strict").code == 0
    code, out, _ = cli("check", path, whole, "--file-only", "--strict", "--json")
    assert code == 1
    assert [each["verdict"] for each in json.loads(out)["plans"]] == ["unknown", "holds"]
