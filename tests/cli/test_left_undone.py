"""Work that a command leaves undone, so that its answer comes soon."""

import subprocess
import sys
from pathlib import Path

import pytest

from offplan.library import alternatives
from tests.cli import CLI, ROOT

QWEN = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"
LISTING = """\
import sys
sys.argv = ["offplan", "machines"]
from offplan.cli.main import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_the_list_of_machines_imports_nothing_that_prices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = set(done.stderr.split())
    rooms = {name.split(".")[1] for name in modules if name.startswith("offplan.")}
    assert not rooms & {"costs", "planner", "engines", "library", "held"}
    assert not modules & {"numpy", "torch"}


@pytest.mark.slow
def test_other_checkpoints_are_planned_once(
    cli: CLI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr("offplan.library.analysis.why_not_plan", lambda *_: None)
    planned: list[object] = []
    try_plan = alternatives.try_plan

    def count(question: object) -> object:
        planned.append(question)
        return try_plan(question)  # type: ignore[arg-type]

    monkeypatch.setattr(alternatives, "try_plan", count)
    answers = [cli("analyze", QWEN, "--machine", "rtx4060,ram=64GiB").out for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(planned) == 2
