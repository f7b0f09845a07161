"""The answer of ``analyze``: its lines, what it assumes and what it advises."""

from pathlib import Path

import pytest
from rich.console import Console

from offplan.machine.name import SHIPPED
from offplan.report.table import Paragraph
from tests.cli import CLI, ROOT

QWEN = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"


def test_lines_break_between_words_alone() -> None:
    console = Console(width=20, force_terminal=False)
    path = "/a/path/that/is-longer/than-the-line.json"
    with console.capture() as captured:
        console.print(Paragraph(f"The file {path} holds well-known words.", "- "), crop=False)
    lines = captured.get().splitlines()
    assert lines == ["- The file", f"  {path}", "  holds well-known", "  words."]


@pytest.mark.slow
def test_advice_names_what_is_better_and_nothing_that_is_on(cli: CLI) -> None:
    asked = ("analyze", QWEN, "--machine", "rtx3060,ram=32GiB")
    long = " ".join(cli(*asked, "--context", "32k").out.split())
    assert "A shorter context: --context 8192 would give " in long
    assert "With no desktop and no browser on this card, --gpu-memory 12GiB takes it." in long
    assert "--kv-cache-dtype fp8 would give " in long
    whole = ("--context", 640, "--gpu-memory", "12GiB", "--kv-cache-dtype", "fp8")
    short = " ".join(cli(*asked, *whole).out.split())
    assert "Look for a repository of this model with " in short
    assert not [
        each for each in ("--context", "--gpu-memory", "--kv") if each in short.split("Next:")[0]
    ]


@pytest.mark.slow
def test_what_fits_needs_no_offloading(cli: CLI, tmp_path: Path) -> None:
    out = cli("analyze", QWEN, "--machine", "rtx4090", "--context", 1024).out
    told = " ".join(out.split())
    assert told.startswith("Runs on NVIDIA GeForce RTX 4090: ")
    assert "of GPU memory. Nothing needs offloading." in told
    # nor does more memory help
    assert "browser" not in told
    assert "none of them measured on your machine. `offplan machines rtx4090-pcie4` prints" in told
    # a file may be of the reader's own machine
    file = tmp_path / "mine.yaml"
    file.write_bytes((SHIPPED / "rtx4090-pcie4.yaml").read_bytes())
    own = cli("analyze", QWEN, "--machine", file, "--context", 1024).out
    assert "The times are estimates from the profile's figures." in " ".join(own.split())
