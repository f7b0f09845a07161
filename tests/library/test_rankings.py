"""Machines ranked for a model, models ranked for a machine, and RAM against speed."""

import json

import pytest

from offplan.checkpoint.popular import list_checkpoints
from tests.cli import CLI, ROOT, TINY_MOE

QWEN = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cpu", "rtx3060-pcie4", "rtx4090-pcie4", "v100-pcie3"]
    monkeypatch.setattr("offplan.library.rankings.shipped_profiles", lambda: names)
    monkeypatch.setattr("offplan.lean.import_less", lambda: None)


@pytest.mark.slow
def test_machines_by_tokens_a_second_of_a_model(cli: CLI, few: None) -> None:
    asked = ("machines", "--model", QWEN, "--context", 1024)
    rows = json.loads(cli(*asked, "--json").out)["machines"]
    assert [row["name"] for row in rows] == ["rtx4090-pcie4", "v100-pcie3", "rtx3060-pcie4"]
    rates = [row["tokens_per_s"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    # each is as `analyze` has it
    plan = json.loads(
        cli("analyze", QWEN, "--machine", "rtx3060", "--context", 1024, "--json").out
    )["plan"]["prediction"]
    assert rows[2]["host_memory_bytes"] == plan["host_memory_bytes"]
    assert rows[2]["first_token_s"] == plan["prefill"]["step_s"]
    assert "needs a GPU of Turing" in rows[1]["why_not"]
    shown = cli(*asked).out
    assert max(map(len, shown.splitlines())) <= 80
    assert "rtx3060-pcie4" in shown
    small = json.loads(cli(*asked, "--ram", "2GiB", "--json").out)["machines"]
    assert [row["tokens_per_s"] is None for row in small] == [False, False, True]
    assert small[2]["ram_bytes"] == rows[2]["ram_bytes"]


@pytest.mark.slow
def test_models_by_tokens_a_second_on_a_machine(
    cli: CLI, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list_checkpoints()[:4]
    monkeypatch.setattr("offplan.checkpoint.popular.list_checkpoints", lambda: listed)
    asked = ("models", "--machine", "rtx3060,ram=4GiB")
    rows = json.loads(cli(*asked, "--json").out)["models"]
    assert {row["name"] for row in rows} == {each.name for each in listed}
    assert rows[0]["tokens_per_s"] > rows[1]["tokens_per_s"]
    assert "openai/gpt-oss-20b" in cli(*asked).out


def test_the_list_of_models_asks_for_nothing(cli: CLI) -> None:
    rows = json.loads(cli("models", "--json").out)["models"]
    assert rows[0]["total_bytes"] < rows[-1]["total_bytes"]
    assert {"name", "form", "total_bytes", "date"} == {*rows[0]}
    assert "2026-11-28" in cli("models").out
    for wrong in (
        ("models", "--context", 1024),
        ("machines", "--ram", "8GiB"),
        ("machines", "rtx4090", "--model", TINY_MOE),
    ):
        assert cli(*wrong).code == 2


@pytest.mark.slow
def test_a_frontier_of_ram(cli: CLI) -> None:
    asked = ("plan", QWEN, "--machine", "rtx3060", "--context", 1024, "--frontier")
    rows = json.loads(cli(*asked, "--json").out)["ram"]
    assert [row["ram_bytes"] for row in rows] == [8 << 30]
    assert "more is no faster" in cli(*asked).out
    # nothing lies in host memory
    fits = (*asked[:3], "rtx4090", *asked[4:])
    assert json.loads(cli(*fits, "--json").out)["ram"] == []
