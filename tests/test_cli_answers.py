"""``offplan plan`` with targets, objectives, the frontier and engines."""

import json

import pytest

from tests.cli import CLI, TINY_MOE


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cli = CLI(monkeypatch, capsys)
    small = ("--machine", "cpu", "--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
    plan = ("plan", TINY_MOE, *small, "--gpu-memory", "1MiB")
    code, out, err = cli(*plan, "--max-tpot", "1us")
    assert (code, out) == (3, "")
    assert "no plan reaches --max-tpot 1 us" in err
    assert json.loads(cli(*plan, "--max-tpot", "1s", "--max-ttft", "1s", "--json").out)["offload"]
    assert cli(*plan, "--max-tpot", "soon").code == 2
    data = json.loads(cli(*plan, "--objective", "throughput", "--json").out)
    assert data["workload"]["batch"] >= 1
    kept = json.loads(cli(*plan, "--objective", "throughput", "--batch", 1, "--json").out)
    assert kept["workload"]["batch"] == 1
    points = json.loads(cli(*plan, "--frontier", "--json").out)["frontier"]
    assert points[0]["objective_s"] >= points[-1]["objective_s"]
    assert "Frontier" in cli(*plan, "--frontier").out
    assert cli(*plan, "--frontier", "-o", "plan.yaml").code == 2
    assert cli(*plan, "--frontier", "--max-tpot", "1s").code == 2
    ours = json.loads(cli(*plan, "--for", "vllm", "--json").out)
    assert len(ours["offload"]["rules"]) == 1
    why = json.loads(cli("analyze", *plan[1:], "--for", "vllm", "--json").out)["why"]
    assert "only plans that vllm can run were searched" in why["reasons"]
