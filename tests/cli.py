"""Runs the command line inside the test's process, as a shell would."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from offplan.cli.main import main

ROOT = Path(__file__).parents[1]
TINY_MOE = ROOT / "plans" / "tiny-moe"


class Finished(NamedTuple):
    code: int
    out: str
    err: str


class CLI:
    """Calls ``offplan``; ``monkeypatch`` and ``capsys`` are the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Finished:
        self._monkeypatch.setattr(sys, "argv", ["offplan", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        code = stopped.value.code
        assert code is None or isinstance(code, int)
        return Finished(code or 0, *self._capsys.readouterr())


def strip_lines(text: str) -> str:
    """Drop the blanks that pad a table's lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
