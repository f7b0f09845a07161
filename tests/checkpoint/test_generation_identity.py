"""The generation config as part of a model: a plan is of one, and of no other."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.open import open_model
from offplan.plan import load_plan
from tests.cli import CLI, ROOT

FILE = "generation_config.json"
KEY = "generation_config_sha256"
TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")
RUN = ("--prompt", "We", "--max-new-tokens", 1, "--device", "cpu")


@pytest.fixture
def plan(copy: Path, tmp_path: Path) -> Path:
    """The shipped plan of a copy of its model."""
    path = tmp_path / "plan.yaml"
    path.write_text(TEXT.replace("source: tiny-moe", "source: model"))
    return path


def without_key(plan: Path) -> None:
    """Make a plan one from before the generation config was recorded."""
    text, num = re.subn(rf"  {KEY}: \w+\n", "", plan.read_text())
    assert num == 1
    plan.write_text(text)


def edit(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit(eos_token_id=7), r"\w{12}"),
        (edit(temperature=0.6), r"\w{12}"),
        (lambda path: path.write_text("{"), r"\w{12}"),
        (lambda path: path.write_bytes(b"\xff"), r"\w{12}"),
        (lambda path: path.write_text("[]"), r"\w{12}"),
        (lambda path: path.unlink(), "none"),
    ],
)
def test_another_generation_config_is_drift(
    cli: CLI, plan: Path, copy: Path, change: Callable[[Path], object], found: str
) -> None:
    assert cli("check", plan, "--file-only").code == 0
    change(copy / FILE)
    told = rf"the plan was made for {FILE} \w{{12}}; \S+ has {found}, which may give other texts"
    for command in (("run", plan, *RUN), ("replan", plan)):
        code, out, err = cli(*command)
        assert (code, out) == (4, "")
        assert re.search(told, err)
        assert "plan it again (offplan replan --accept-drift), or restore the file" in err
    code, out, _ = cli("check", plan, "--file-only")
    assert (code, f"made for {FILE}" in " ".join(out.split())) == (4, True)
    code, out, _ = cli("replan", plan, "--accept-drift")
    assert code == 0
    before = plan.read_text()
    differ = {*before.splitlines()} ^ {*out.splitlines()}
    assert all(KEY in line for line in differ)
    assert (f"  {KEY}: null\n" in out or KEY not in out) == (found == "none")


@pytest.mark.slow
@pytest.mark.parametrize("change", [edit(transformers_version="6"), edit()])
def test_what_changes_no_text_is_no_drift(
    cli: CLI, plan: Path, copy: Path, change: Callable[[Path], object]
) -> None:
    before = (copy / FILE).read_bytes()
    change(copy / FILE)
    assert (copy / FILE).read_bytes() != before
    assert cli("check", plan, "--file-only").code == 0
    assert cli("run", plan, *RUN).code == 0


@pytest.mark.slow
def test_a_plan_from_before_it_was_recorded(cli: CLI, plan: Path, copy: Path) -> None:
    whole = plan.read_text()
    without_key(plan)
    edit(temperature=0.6)(copy / FILE)
    code, out, _ = cli("check", plan, "--file-only")
    assert (code, "headers and config.json of model are" in out) == (0, True)
    assert cli("run", plan, *RUN).code == 0
    (copy / FILE).write_bytes((ROOT / "plans" / "tiny-moe" / FILE).read_bytes())
    code, out, _ = cli("replan", plan)
    assert (code, sorted(out.splitlines())) == (0, sorted(whole.splitlines()))


@pytest.mark.slow
def test_a_plan_of_a_model_without_any(cli: CLI, plan: Path, copy: Path) -> None:
    (copy / FILE).unlink()
    code, out, _ = cli("plan", copy, "--machine", "cpu")
    assert (code, KEY in out) == (0, False)
    plan.write_text(out)
    assert load_plan(plan).model.generation_config_sha256 is None
    (copy / FILE).write_text("{}")
    assert cli("check", plan, "--file-only").code == 0


@pytest.mark.slow
def test_a_config_alone(cli: CLI, plan: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "config.json"
    alone.write_bytes((copy / "config.json").read_bytes())
    assert open_model(str(alone)).generation is None
    code, out, _ = cli("check", plan, "--file-only", "--model", alone)
    assert (code, "headers and config.json of model are" in out) == (0, True)
    (alone.parent / FILE).write_bytes((copy / FILE).read_bytes())
    assert open_model(str(alone)).generation == open_model(str(copy)).generation
    assert cli("check", plan, "--file-only", "--model", alone).code == 0
    (alone.parent / FILE).write_text("{}")
    assert cli("check", plan, "--file-only", "--model", alone).code == 4
