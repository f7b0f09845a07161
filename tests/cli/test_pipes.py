"""What commands do where somebody closes the pipe that they print to, or reads it as text."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.cli import CLI, ROOT, TINY_MOE

SMALL = ("--prompt-tokens", 32, "--output-tokens", 96, "--context", 256)
ASKED = (TINY_MOE, "--machine", "cpu", "--gpu-memory", "1MiB", *SMALL)
PLAN = ROOT / "plans" / "tiny-moe.yaml"


@contextmanager
def closed_pipes() -> Iterator[None]:
    """Make stdout and stderr pipes that nobody reads any more."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.close(reader)
            stack.enter_context(suppress(BrokenPipeError))
            stream = stack.enter_context(open(writer, "w", encoding="utf-8"))
            patch.setattr(sys, name, stream)
        yield
        sys.stdout.close()  # by then it may be another one, which leads nowhere


@pytest.mark.parametrize(
    "command",
    [
        ("analyze", *ASKED),
        ("analyze", *ASKED, "--json"),
        ("plan", *ASKED, "--json"),
        ("plan", *ASKED, "-v"),
        ("replan", PLAN, "--json"),
    ],
    ids=["analyze", "analyze --json", "plan --json", "plan -v", "replan --json"],
)
def test_files_are_written_though_nobody_reads_the_answer(
    cli: CLI, tmp_path: Path, command: tuple[object, ...]
) -> None:
    path = tmp_path / "made.yaml"
    with closed_pipes():
        cli(*command, "-o", path)
    assert path.read_text().startswith("offplan: 1")


@pytest.mark.parametrize(
    "command",
    [
        ("analyze", *ASKED, "-v"),
        ("machines",),
        ("machines", "h200-pcie5"),
        ("explain", PLAN),
        ("check", PLAN, "--file-only"),
        ("show", PLAN),
    ],
    ids=["analyze -v", "machines", "machines h200", "explain", "check", "show"],
)
def test_lines_in_a_pipe_have_no_blanks_behind_them(cli: CLI, command: tuple[object, ...]) -> None:
    lines = cli(*command).out.split("\n")
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.slow
def test_tables_in_a_pipe_are_not_wrapped(cli: CLI, tmp_path: Path) -> None:
    lines = cli("check", PLAN).out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["model", "figures", "profile"]
    edited = tmp_path / "edited.yaml"
    text = PLAN.read_text("utf-8").replace("source: tiny-moe", f"source: {TINY_MOE}")
    edited.write_text(text.replace("group_size: 2", "group_size: 3"), "utf-8")
    (rule,) = (each for each in cli("diff", PLAN, edited).out.splitlines() if "rules 1" in each)
    assert rule.endswith("group_size 3, num_in_group 1, prefill prefetch, decode prefetch")
