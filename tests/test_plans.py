"""The shipped plans are what ``plans/replan.sh`` makes, byte for byte."""

import json
import shlex
from pathlib import Path

import pytest
from jsonschema.validators import validator_for

from offplan.checkpoint.open import open_model
from offplan.library.repricing import hold_planned, price_on
from offplan.machine.profile import load_profile
from offplan.plan import load_plan
from offplan.records import load_yaml
from offplan.report.portrait import draw_poster, portray
from tests.cli import CLI, ROOT

PLANS = ROOT / "plans"
COMMANDS = [
    line.removeprefix("offplan ")
    for line in (PLANS / "replan.sh").read_text("utf-8").splitlines()
    if line.startswith("offplan plan ")
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("/")[-1])
def test_replan(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PLANS)
    *arguments, force, to, path = shlex.split(command)
    assert (force, to) == ("--force", "-o")
    code, out, err = CLI(monkeypatch, capsys)(*arguments)
    assert (code, "offplan: Runs on " in err) == (0, True)
    assert out == Path(path).read_text("utf-8"), f"run plans/replan.sh to renew {path}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_the_picture_is_of_its_plan(path: Path) -> None:
    """Not planned again, which takes seconds: the plan's own test does."""
    folder = ROOT / "tests" / "models"
    plan = load_plan(PLANS / f"{path.stem}.yaml")
    machine = load_profile("h200-pcie5")
    model = open_model(str(folder / "qwen3-8b" / "config.json"), name=plan.model.source)
    drawn = draw_poster(portray(price_on(plan, model, machine), hold_planned(plan, model), machine))
    assert drawn == path.read_text("utf-8"), f"run plans/replan.sh to renew {path.name}"


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_takes_the_plan(cli: CLI, path: Path) -> None:
    schema = json.loads(cli("schema").out)
    validator = validator_for(schema, None)  # type: ignore[arg-type]
    validator(schema).validate(load_yaml(path.read_text("utf-8")))


def test_every_plan_has_its_command() -> None:
    made = {Path(shlex.split(command)[-1]) for command in COMMANDS}
    assert made == {path.relative_to(PLANS) for path in PLANS.glob("*.yaml")}
