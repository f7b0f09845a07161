"""Runs the command line inside the test's process, as a shell would."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from offplan.cli.main import main

ROOT = Path(__file__).parents[2]
TINY_MOE = ROOT / "plans" / "tiny-moe"

RULES = {
    "resident": "[]",
    "streamed": "[{group_size: 1, num_in_group: 1, prefill: prefetch, decode: prefetch}]",
    "in_place": "[{cpu_offload_params: [experts], max_bytes: 200 KiB, prefill: uva, decode: uva}]",
    "mixed": "[{cpu_offload_params: [experts], group_size: 3, num_in_group: 2, prefill: prefetch, "
    "decode: uva}, {group_size: 2, num_in_group: 1, prefill: prefetch, decode: prefetch}]",
}
"""Rules of every kind, as a plan of the tiny checkpoint may have them."""


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
        # this process runs models, too
        self._monkeypatch.setattr("offplan.cli.query.import_less", lambda: None)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        code = stopped.value.code
        assert code is None or isinstance(code, int)
        return Finished(code or 0, *self._capsys.readouterr())


def write_plan(folder: Path, rules: str) -> Path:
    """Take the shipped plan with other rules, for a generation config of any content."""
    text = (ROOT / "plans" / "tiny-moe.yaml").read_text()
    text = re.sub(r"  generation_config_sha256: \w+\n", "", text)
    text = text.replace("source: tiny-moe", f"source: {TINY_MOE}")
    text = text.replace("budget: {gpu_memory: 1 MiB,", "budget: {gpu_memory: 64 MiB,")
    before, after = text.split("  prefetch_step:")[0], text[text.index("prediction:") :]
    path = folder / "plan.yaml"
    path.write_text(f"{before}  prefetch_step: 2\n  prefill_chunk: 8\n  rules: {rules}\n{after}")
    return path
