"""The tutorial's commands run in their order, and say what the page shows of them."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from offplan.machine import measure_cpu
from tests.cli import CLI, ROOT, TINY_MOE

PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
REFUSED = {"100KiB": 3}
"""Exit codes of commands that are to fail, by a word of theirs."""


def steps() -> list[tuple[list[str], list[str]]]:
    """Each command of the page, and the lines that it shows of the output."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = step.splitlines()
            found.append((shlex.split(command)[1:], [line for line in shown if line.strip(" .")]))
    return found


def label(line: str) -> str:
    """What a line says before its first figure, or name of a weight, that may be another one."""
    return " ".join(re.split(r"\d|: (?=\w+, )|The plan:", line)[0].split())


@pytest.mark.slow
def test_the_tutorial(cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_cpu, "_LARGE_BYTES", 2**20)
    monkeypatch.setattr("offplan.library.machines.has_gpu", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shutil.copytree(TINY_MOE, tmp_path / "plans" / "tiny-moe")
    monkeypatch.chdir(tmp_path)
    assert len(steps()) > 9
    for command, shown in steps():
        code, out, err = cli(*command)
        expected = next((REFUSED[word] for word in command if word in REFUSED), 0)
        assert code == expected, (command, err)
        said = " ".join((out + err).split())
        assert not [line for line in shown if label(line) not in said], (command, out, err)
