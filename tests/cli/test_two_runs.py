"""Two runs that write one file of results, the first in a process of its own."""

import errno
import fcntl
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli import CLI, RULES, write_plan
from tests.warm import Process, Warm

PROMPTS = ["Weights", "Wei", "The GPU"]
HELD = """
import sys
from offplan.runtime.joined import JoinedTexts
step = JoinedTexts.step
def held(self):
    made = [*step(self)]
    yield from made
    if made:
        print("generating", flush=True)
        sys.stdin.readline()
JoinedTexts.step = held
from offplan.cli.main import main
main()
"""
"""The program, which waits after its first tokens for a line, or for the end of its input."""


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    """Arguments of a run that writes ``same.jsonl``."""
    plan, asked = write_plan(tmp_path, RULES["mixed"]), tmp_path / "prompts.jsonl"
    asked.write_text("".join(f'{{"prompt": "{each}"}}\n' for each in PROMPTS))
    ends = ("--max-new-tokens", 2, "--device", "cpu")
    return ["run", plan, "--prompts", asked, "-o", tmp_path / "same.jsonl", *ends]


@contextmanager
def held(warm: Warm, command: list[object]) -> Iterator[Process]:
    """Begin a run that holds on once it generates."""
    with warm.open(HELD, *command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "generating\n"
        yield process


def finish(process: Process) -> int:
    """Let a run go on to its end."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(120)


def kill(process: Process) -> int:
    process.send_signal(signal.SIGKILL)
    return process.wait(120)


@pytest.mark.slow
@pytest.mark.parametrize("end", [finish, kill])
def test_the_second_run_is_refused_while_the_first_lasts(
    cli: CLI,
    warm: Warm,
    command: list[object],
    tmp_path: Path,
    end: Callable[[Process], int],
) -> None:
    path = tmp_path / "same.jsonl"
    with held(warm, command) as first:
        for force in ([], ["--force"]):
            before = path.read_bytes()
            code, out, err = cli(*command, *force)
            assert (code, out) == (2, "")
            assert err.endswith(
                f"offplan: {path} is being written by another offplan run: wait until that ends, "
                "or name another file\n"
            )
            assert path.read_bytes() == before
        assert end(first) == (0 if end is finish else -9)
    code, _, err = cli(*command)
    assert code == 0, err
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.slow
def test_lines_that_two_runs_wrote_are_told(
    cli: CLI, command: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "same.jsonl"
    assert cli(*command).code == 0
    lines = path.read_text().splitlines(keepends=True)
    doubled = "".join([*lines[:2], *lines[:2], lines[0]])
    path.write_text(doubled)
    code, _, err = cli(*command)
    assert code == 0, err
    assert f"offplan: {path}: found 3 more results than one a prompt" in err
    assert f"2 of 3 texts are in {path} already" in err
    assert path.read_text() == doubled + lines[2]
    assert cli(*command, "--force").code == 0
    assert path.read_text() == "".join(lines)


def test_results_of_something_else_are_let_go(
    cli: CLI, command: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text("mine\n")
    assert "is no result of offplan run" in cli(*command).err
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_file_system_without_locks(
    cli: CLI, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    code, _, err = cli(*command)
    assert code == 0, err
    assert "same.jsonl cannot be locked (No locks available): let no other run" in err
