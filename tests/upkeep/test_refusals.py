"""What ``run`` refuses before it loads anything, ``check`` refuses too, and nothing offers."""

import re
from pathlib import Path

import pytest

from offplan.library.asking import ask_again
from offplan.plan import load_plan
from offplan.planner.neighbours import find_neighbours
from tests.cli import CLI, TINY_MOE, write_plan

ALL = "group_size: 1, num_in_group: 1, prefill: prefetch"
REFUSED = {
    "cores without down": f"[{{cpu_offload_params: [experts.gate_proj, experts.up_proj], {ALL}, "
    "decode: host}]",
    "cores with down alone": f"[{{cpu_offload_params: [experts.down_proj], {ALL}, decode: host}}]",
    "half of what is fused": f"[{{cpu_offload_params: [experts.gate_proj], {ALL}, decode: uva}}]",
    "no such parameter": f"[{{cpu_offload_params: [nothing], {ALL}, decode: uva}}]",
    "kept without down": f"[{{cpu_offload_params: [experts.gate_proj, experts.up_proj], {ALL}, "
    "decode: uva, cached_experts: 1}]",
    "more kept than there are": f"[{{cpu_offload_params: [experts], {ALL}, decode: uva, "
    "cached_experts: 9}]",
    "parts that do not divide": f"[{{cpu_offload_params: [experts], {ALL}, decode: uva, "
    "parts: 3}]",
}
KEEPING = f"[{{cpu_offload_params: [experts], {ALL}, decode: uva, cached_experts: 1}}]"
IN_PARTS = f"[{{cpu_offload_params: [experts], {ALL}, decode: uva, parts: 2}}]"
BY_OTHERS = {
    "kept by transformers": (KEEPING, "{objective: latency,", "{objective: latency, stock: true,"),
    "parts by transformers": (
        IN_PARTS,
        "{objective: latency,",
        "{objective: latency, stock: true,",
    ),
    "kept for too many": (KEEPING, "{batch: 1,", "{batch: 1000,"),
}


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def require_refused_alike(cli: CLI, plan: Path) -> None:
    ran = cli("run", plan, "--device", "cpu", "--dummy-weights", "--max-new-tokens", "2")
    assert ran.code == 2, ran
    why = words(ran.err.splitlines()[-1]).partition(": ")[2]
    checked = cli("check", plan, "--file-only")
    assert checked.code in (2, 4), checked
    assert why.strip() in words(checked.out)


@pytest.mark.parametrize("name", REFUSED)
def test_a_decision_that_run_refuses(cli: CLI, tmp_path: Path, name: str) -> None:
    require_refused_alike(cli, write_plan(tmp_path, REFUSED[name]))


@pytest.mark.parametrize("name", BY_OTHERS)
def test_a_decision_that_run_refuses_for_its_question(cli: CLI, tmp_path: Path, name: str) -> None:
    rules, before, after = BY_OTHERS[name]
    plan = write_plan(tmp_path, rules)
    text = plan.read_text("utf-8")
    assert before in text
    plan.write_text(text.replace(before, after), "utf-8")
    require_refused_alike(cli, plan)


def test_a_model_that_run_refuses(cli: CLI, tmp_path: Path, copy: Path) -> None:
    plan = write_plan(tmp_path, "[]")
    config = copy / "config.json"
    config.write_text(config.read_text("utf-8").replace("{", '{"is_causal": false,', 1), "utf-8")
    plan.write_text(plan.read_text("utf-8").replace(f"{TINY_MOE}", f"{copy}"), "utf-8")
    made = tmp_path / "made.yaml"
    assert cli("replan", plan, "--accept-drift", "-o", made).code == 0
    checked = cli("check", made, "--file-only")
    assert checked.code == 2, checked
    assert "tokens behind its own" in words(checked.out)
    ran = cli("run", made, "--device", "cpu", "--dummy-weights")
    assert (ran.code, "tokens behind its own" in ran.err) == (2, True)


def test_a_machine_that_run_is_not_for(cli: CLI, tmp_path: Path) -> None:
    made = tmp_path / "made.yaml"
    assert cli("plan", TINY_MOE, "--machine", "v100", "-o", made).code == 0
    checked = cli("check", made, "--file-only")
    assert checked.code == 2, checked
    assert "needs a GPU of Turing (RTX 20, T4) or newer" in words(checked.out)


def test_an_engine_that_cannot_be_told_the_decision(cli: CLI, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, KEEPING)
    text = plan.read_text("utf-8")
    goal = "goal: {objective: latency, cached_experts: auto, parts: auto}"
    assert goal in text
    plan.write_text(text.replace(goal, "goal: {objective: latency, engine: vllm}"), "utf-8")
    exported = cli("export", plan, "--engine", "vllm")
    assert exported.code == 2
    checked = cli("check", plan, "--file-only")
    assert checked.code in (2, 4)
    told = "rule 1 keeps 1 experts of a layer on the GPU (cached_experts), which vLLM does not do"
    assert told in words(exported.err)
    assert told in words(checked.out)


def test_no_neighbour_is_what_run_refuses(tmp_path: Path) -> None:
    rules = REFUSED["cores without down"].replace("decode: host", "decode: uva")
    path = write_plan(tmp_path, rules)
    text = path.read_text("utf-8")
    path.write_text(text.replace("goal: {objective", "goal: {host_cores: true, objective"), "utf-8")
    plan = load_plan(path)
    found = {each.change for each in find_neighbours(ask_again(plan), plan)}
    assert "rule 1: decode uva -> prefetch" in found
    assert "rule 1: decode uva -> host" not in found
