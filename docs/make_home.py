"""Write README's table of models on home machines, from the answers of ``offplan analyze``.

    python docs/make_home.py

It takes the place of what stands between the two comments in README.md. ``tests/test_docs.py``
holds README to it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offplan.checkpoint.popular import list_checkpoints
from offplan.checkpoint.requantise import requantise
from offplan.costs.ranges import step_range
from offplan.errors import InfeasibleError
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.placement import Phase
from offplan.plan import Workload
from offplan.planner.make import try_plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- python docs/make_home.py writes this table -->\n", "<!-- end -->\n"

MACHINES = {
    "4060 laptop, 32 GB": "rtx4060-laptop,ram=32GiB",
    "3090, 64 GB": "rtx3090,ram=64GiB",
    "4090, 64 GB": "rtx4090,ram=64GiB",
    "5090, 64 GB": "rtx5090,ram=64GiB",
}


class Row(NamedTuple):
    """A model in a stored form."""

    name: str
    checkpoint: str
    bits: int | None = None
    """Bits that its linear layers are stored in, in place of the checkpoint's own."""
    measured: str = ""
    """Key of a row of the results that were measured."""


ROWS = (
    Row("gpt-oss-20b, MXFP4", "openai/gpt-oss-20b", None, "gpt-oss-20b"),
    Row("gpt-oss-120b, MXFP4", "openai/gpt-oss-120b", None, "gpt-oss-120b"),
    Row("Qwen3-8B, bf16", "Qwen/Qwen3-8B", None, "Qwen3-8B, bf16"),
    Row("Qwen3-8B, 4 bits", "Qwen/Qwen3-8B", 4),
    Row("Qwen3-30B-A3B, 8 bits", "Qwen/Qwen3-30B-A3B", 8, "Qwen3-30B-A3B, 8 bits"),
    Row("Qwen3-30B-A3B, 4 bits", "Qwen/Qwen3-30B-A3B", 4),
    Row("GLM-4.5-Air, 4 bits", "zai-org/GLM-4.5-Air", 4, "GLM-4.5-Air, 4 bits"),
    Row("Llama-3.3-70B, 4 bits", "meta-llama/Llama-3.3-70B-Instruct", 4),
)


def estimate(row: Row, machine: str) -> str:
    """Return the range of tokens a second by the best plan for a chat."""
    (checkpoint,) = (each for each in list_checkpoints() if each.name == row.checkpoint)
    model = checkpoint.open()
    if row.bits is not None:
        fewer = requantise(model, row.bits)
        assert fewer is not None, row
        model = fewer
    try:
        plan = try_plan(ask(model, load_machine(machine), Workload())).plan
    except InfeasibleError:
        return "no"
    ends = step_range(plan.prediction, plan.offload, Phase.DECODE)
    assert ends is not None, "no shipped profile of a home GPU is measured"
    low, high = (f"{1 / each:.{0 if each < 0.1 else 1}f}" for each in reversed(ends))
    mark = "" if plan.offload.rules else " \\*"
    return f"{low} to {high}{mark}"


def _list_lines() -> Iterator[str]:
    text = (ROOT / "benchmarks" / "results" / "llama-cpp-h200.json").read_text("utf-8")
    measured = {row["model"]: row for row in json.loads(text)["rows"]}
    yield f"| model | {' | '.join(MACHINES)} | H200, **measured** |"
    yield "|---" * (2 + len(MACHINES)) + "|"
    for row in ROWS:
        cells = [estimate(row, machine) for machine in MACHINES.values()]
        told = ""
        if (found := measured.get(row.measured)) is not None:
            best = min(each["token"] for key, each in found.items() if key.startswith("offplan"))
            told = f"**{1000 / best:.0f}** in {found['gpu_memory']}"
        yield f"| {' | '.join([row.name, *cells, told])} |"


def render_table() -> str:
    """Return the table, between its comments."""
    return BEGIN + "\n" + "\n".join(_list_lines()) + "\n\n" + END


if __name__ == "__main__":
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(before + render_table() + rest.split(END, 1)[1], "utf-8")
