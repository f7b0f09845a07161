"""``offplan bench`` on the tiny checkpoint: every figure in its place; none of them is timed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.capabilities.cached_experts import LATER_STEPS
from offplan.errors import MemoryLimitError
from offplan.plan import load_plan
from offplan.runtime.measuring import versus
from offplan.runtime.session import Session
from tests.cli import CLI, ROOT, RULES, TINY_MOE, write_plan

QUICK = ("--device", "cpu", "--steps", 2, "--repeats", 1)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CLI:
    monkeypatch.chdir(TINY_MOE.parents[1])
    return CLI(monkeypatch, capsys)


def bench(cli: CLI, plan: object, *arguments: object) -> dict[str, Any]:
    code, out, err = cli("bench", plan, *QUICK, *arguments, "--json")
    assert code == 0, err
    payload: dict[str, Any] = json.loads(out)
    return payload


@pytest.mark.slow
def test_the_report(cli: CLI) -> None:
    ways = ("resident", "serial", "accelerate")
    code, out, _ = cli("bench", "plans/tiny-moe.yaml", *QUICK, "--vs", ",".join(ways))
    assert code == 0
    for title in ("Decode, a step", "Prefill, the prompt", "Link and memory", "Stalls by layer"):
        assert f"\n{title}" in f"\n{out}"
    for row in ("bound", "waiting for the link", "time / bound", "host memory", "5", *ways):
        assert f"\n{row} " in out
    assert "medians of 1 prompts and 2 decode steps" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_predicted_and_measured_have_the_same_keys(cli: CLI) -> None:
    data = bench(cli, "plans/tiny-moe.yaml")
    facts = ["device", "batch", "prompt_tokens", "num_steps", "num_repeats"]
    ran = ["plan", "runtime", "predicted", "measured", "experts", "left_unpacked", "vs"]
    assert list(data) == ["offplan", *facts, "way", *ran]
    assert data["way"] == "own"
    for side in ("predicted", "measured"):
        for phase in ("decode", "prefill"):
            assert data[side][phase].keys() >= {"step_s", "link_bytes", "stall_s", "bound_s"}
        assert "total_bytes" in data[side]["gpu_memory"]
    assert data["measured"]["gpu_memory"]["total_bytes"] is None
    assert data["measured"]["host_memory"]["process_bytes"] > 2**20
    assert data["measured"]["notes"] == []
    assert data["vs"] == {}


@pytest.mark.slow
def test_a_plan_for_an_engine_is_predicted_as_it_runs_here(cli: CLI, tmp_path: Path) -> None:
    text = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8").replace("tiny-moe", str(TINY_MOE))
    plan, found = tmp_path / "plan.yaml", tmp_path / "bench.json"
    own = "latency, cached_experts: auto, parts: auto}"
    plan.write_text(text.replace(own, "latency, engine: vllm}"))
    assert cli("replan", plan, "-o", plan, "--force", "--accept-drift").code == 0
    for command in (("run", plan, "--max-new-tokens", 2), ("bench", plan, *QUICK, "--json")):
        code, out, err = cli(*command, "--device", "cpu")
        assert (code, "for vllm: predicted and run by offplan's own runtime" in err) == (0, True)
    found.write_text(out)
    page = tmp_path / "page.html"
    assert cli("report", plan, "--bench", found, "-o", page).code == 0
    text = page.read_text("utf-8")
    for told in ("The plan is for vllm; offplan", "predicted (offplan)", "measured (offplan)"):
        assert told in text
    # what was run is another workload, or another decision
    found.write_text(json.dumps(json.loads(out) | {"batch": 2}))
    code, _, err = cli("report", plan, "--bench", found, "-o", page, "--force")
    assert (code, "it ran batch 2" in err) == (2, True)
    data = json.loads(out)
    data["plan"]["offload"]["prefetch_step"] += 1
    found.write_text(json.dumps(data))
    code, _, err = cli("report", plan, "--bench", found, "-o", page, "--force")
    assert (code, "its decision is another" in err) == (2, True)
    # where the profile is not there, the prediction is the engine's
    data = json.loads(out) | {"runtime": {"predicted": "vllm", "measured": "offplan"}}
    for phase in ("prefill", "decode"):
        step_s = getattr(load_plan(plan).prediction, phase).step_s
        data["predicted"][phase]["step_s"] = step_s
    found.write_text(json.dumps(data))
    assert cli("report", plan, "--bench", found, "-o", page, "--force").code == 0
    assert "predicted (vllm)" in page.read_text("utf-8")
    assert "ratios of times say nothing" in page.read_text("utf-8")


@pytest.mark.slow
def test_steps_that_decide_are_not_timed(
    cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether experts are brought for later: plans promise what comes behind that."""
    real, counted = Session.decode, []
    monkeypatch.setattr(Session, "decode", lambda *args: counted.append(args) or real(*args))
    found = []
    for later in ("null", "1.0"):
        keeps = f"prefill: uva, decode: host, cached_experts: 2, later_experts: {later}"
        every = "cpu_offload_params: [experts], group_size: 1, num_in_group: 1"
        counted.clear()
        assert bench(cli, write_plan(tmp_path, f"[{{{every}, {keeps}}}]"))["experts"]["counted"]
        found.append(len(counted))
    assert found[1] - found[0] == LATER_STEPS


@pytest.mark.slow
def test_bytes_moved_are_those_predicted(cli: CLI) -> None:
    data = bench(cli, "plans/tiny-moe.yaml")
    for phase in ("decode", "prefill"):
        measured = data["measured"][phase]
        assert measured["link_bytes"] == data["predicted"][phase]["link_bytes"] > 0
        assert {stall["layer"] for stall in measured["stalls"]} == {1, 3, 5}
        assert measured["stall_s"] == pytest.approx(sum(s["stall_s"] for s in measured["stalls"]))


@pytest.mark.slow
def test_the_bound_is_compute_or_the_link(cli: CLI) -> None:
    data = bench(cli, "plans/tiny-moe.yaml", "--vs", "resident")
    rate = data["measured"]["link"]["bytes_per_s"]
    for phase in ("decode", "prefill"):
        measured = data["measured"][phase]
        assert measured["compute_s"] == data["vs"]["resident"][phase]["step_s"]
        link_s = measured["link_bytes"] / rate
        assert measured["bound_s"] == max(measured["compute_s"], link_s)
    alone = bench(cli, "plans/tiny-moe.yaml")
    assert alone["measured"]["decode"]["compute_s"] == alone["predicted"]["decode"]["compute_s"]


@pytest.mark.slow
def test_what_is_read_in_place_is_not_counted(cli: CLI, tmp_path: Path) -> None:
    data = bench(cli, write_plan(tmp_path, RULES["mixed"]), "--vs", "accelerate,serial,resident")
    measured = data["measured"]
    assert (measured["decode"]["link_bytes"], measured["decode"]["bound_s"]) == (None, None)
    assert measured["prefill"]["link_bytes"] > 0
    assert measured["prefill"]["bound_s"] > 0
    assert list(data["vs"]) == ["accelerate", "serial", "resident"]
    assert all(way["decode"]["step_s"] > 0 for way in data["vs"].values())


def test_a_plan_that_streams_nothing(cli: CLI, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "[]")
    data = bench(cli, plan)
    assert data["measured"]["link"]["bytes_per_s"] is None
    decode = data["measured"]["decode"]
    assert (decode["link_bytes"], decode["stall_s"], decode["stalls"]) == (0, 0, [])
    assert decode["bound_s"] == decode["compute_s"]
    assert "Stalls by layer" not in cli("bench", plan, *QUICK).out


@pytest.mark.slow
def test_a_way_that_does_not_fit_leaves_the_others(
    cli: CLI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryLimitError("the device has no room for 15 GiB of resident weights")

    monkeypatch.setitem(versus.WAYS, "resident", refuse)
    data = bench(cli, "plans/tiny-moe.yaml", "--vs", "resident,serial")
    resident, serial = data["vs"]["resident"], data["vs"]["serial"]
    assert resident["decode"] is None
    assert "no room" in resident["why_not"]
    assert serial["decode"]["step_s"] > 0
    assert serial["why_not"] is None
    out = cli("bench", "plans/tiny-moe.yaml", *QUICK, "--vs", "resident").out
    assert "resident: the device has no room" in out


@pytest.mark.slow
def test_accelerate_holds_nothing_packed(cli: CLI, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, RULES["streamed"])
    packed = (
        "  packing: {cpu_offload_params: [self_attn], group_size: 1, num_in_group: 1}\n  rules:"
    )
    plan.write_text(plan.read_text().replace("  rules:", packed))
    out = " ".join(cli("bench", plan, *QUICK, "--vs", "accelerate").out.split())
    assert "a plan made with --no-packing compares them in the same" in out
    assert "--no-packing" not in cli("bench", plan, *QUICK).out


def test_accelerate_is_optional(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    code, out, err = cli("bench", "plans/tiny-moe.yaml", *QUICK, "--vs", "accelerate")
    assert (code, out) == (2, "")
    assert "pip install accelerate" in err


@pytest.mark.slow
def test_dummy_weights_need_no_checkpoint(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps read tokens that no logits chose: those of random weights come again and again."""
    fed, decode = [], Session.decode

    def note(session: Session, tokens: torch.Tensor) -> torch.Tensor:
        fed.append(tokens.flatten().tolist())
        return decode(session, tokens) * 0  # one token is the likeliest

    monkeypatch.setattr(Session, "decode", note)
    config = "plans/tiny-moe/config.json"
    arguments = ("--model", config, "--dummy-weights", "--steps", 20)
    data = bench(cli, "plans/tiny-moe.yaml", *arguments)
    assert data["measured"]["decode"]["step_s"] > 0
    made, fed[:] = [*fed], []
    assert len({*map(tuple, made)}) > len(made) / 2
    bench(cli, "plans/tiny-moe.yaml", *arguments)
    assert fed == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vs", "resident,vllm"), "'vllm' is not a way to run a plan"),
        (("--vs", ""), "'' is not a way to run a plan"),
        (("--steps", 1000), "exceed the plan's context of 256"),
        (("--steps", 0), "Invalid value for '--steps'"),
        (("--device", "abacus"), "is not a device"),
        (("--model", "plans/tiny-moe/config.json"), "has no weights"),
    ],
)
def test_bad_input_exits_2(cli: CLI, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = cli("bench", "plans/tiny-moe.yaml", *arguments)
    assert (code, out) == (2, "")
    assert message in err
