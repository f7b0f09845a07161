"""The shipped plans are what ``plans/replan.sh`` makes, byte for byte."""

import shlex
from pathlib import Path

import pytest

from tests.cli import CLI, ROOT, RUNS

PLANS = ROOT / "plans"
COMMANDS = [
    line.removeprefix("offplan ")
    for line in (PLANS / "replan.sh").read_text("utf-8").splitlines()
    if line.startswith("offplan ")
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("/")[-1])
def test_replan(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PLANS)
    *arguments, force, to, path = shlex.split(command)
    assert (force, to) == ("--force", "-o")
    code, out, err = CLI(monkeypatch, capsys)(*arguments)
    assert (code, err) == (0, RUNS)
    assert out == Path(path).read_text("utf-8"), f"run plans/replan.sh to renew {path}"


def test_every_plan_has_its_command() -> None:
    made = {Path(shlex.split(command)[-1]) for command in COMMANDS}
    assert made == {path.relative_to(PLANS) for path in PLANS.glob("*.yaml")}
