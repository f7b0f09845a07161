"""Time plans beside llama.cpp at equal GPU memory, one row after another, as JSON.

    python -m benchmarks.llama_cpp FOLDER [NAME ...] [--workloads 512x1 8192x1 512x4] > rows.json

Needs a CUDA device, ``llama-bench`` on PATH, and for batches ``llama-batched-bench``. FOLDER gets
GGUF files of random weights, each removed behind its rows: best one in memory, for 60 GB of
gpt-oss-120b. NAMEs pick models by a part of their name. A workload is the tokens of a prompt and
the number of sequences. Batches are split as one sequence is whose context is as long as all of
them together.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictions import bench, offplan
from benchmarks.random_gguf import TYPES, write
from benchmarks.run_plan import describe_machine
from offplan.runtime.memory.gpu_memory import bytes_in_use


@dataclass(frozen=True)
class Row:
    """A published shape, the form that llama.cpp has it in, and GPU memory for both."""

    name: str
    config: str
    stored: str
    gpu_memory: str


ROWS = (
    Row("gpt-oss-20b", "benchmarks/models/gpt-oss-20b", "q8_0", "8GiB"),
    Row("gpt-oss-120b", "benchmarks/models/gpt-oss-120b", "q8_0", "24GiB"),
    Row("Qwen3-30B-A3B, 8 bits", "benchmarks/models/qwen3-30b-a3b-fp8", "q8_0", "12GiB"),
    Row("Qwen3-32B, 4 bits", "benchmarks/models/qwen3-32b-w4a16", "q4_0", "12GiB"),
    Row("Qwen3-8B, bf16", "tests/models/qwen3-8b", "bf16", "11GiB"),
    Row("GLM-4.5-Air, 4 bits", "benchmarks/models/glm-4.5-air", "q4_0", "24GiB"),
)


def plan(row: Row, file: Path, prompt_tokens: int, batch: int, output_tokens: int) -> None:
    """Plan a row's workload for this machine, whose context ends with the output."""
    context = max(2048, prompt_tokens + output_tokens)
    offplan(
        *("plan", str(Path(row.config, "config.json").resolve()), "--force", "-q"),
        *("--gpu-memory", row.gpu_memory, "--batch", str(batch), "-o", str(file)),
        *("--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)),
        *("--context", str(context)),
    )


def watch(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``work`` returns, and the most that it took of the GPU's memory meanwhile."""
    device, done = torch.device("cuda"), threading.Event()
    before = peak = bytes_in_use(device)

    def look() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, bytes_in_use(device))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        return work(), peak - before
    finally:
        done.set()
        looking.join()


def time_batch(gguf: Path, split: Sequence[str], prompt_tokens: int, batch: int) -> dict[str, Any]:
    """Time llama.cpp's prompts and steps of several sequences."""
    context = batch * max(2048, prompt_tokens + 128)
    command = [
        *("llama-batched-bench", "-m", str(gguf), "-npp", str(prompt_tokens), "-ntg", "64"),
        *("-npl", str(batch), "-c", str(context), "-fa", "on", "--output-format", "jsonl", *split),
    ]
    done, gpu_bytes = watch(
        partial(subprocess.run, command, check=True, capture_output=True, text=True)
    )
    text = done.stdout
    (found,) = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return {
        "token_s": found["t_tg"] / found["tg"],
        "prompt_s": found["t_pp"],
        "gpu_bytes": gpu_bytes,
        "command": shlex.join(command),
    }


def measure(row: Row, folder: Path, gguf: Path, prompt_tokens: int, batch: int) -> dict[str, Any]:
    """Measure both ways of a row."""
    file = folder / "plan.yaml"
    plan(row, file, batch * prompt_tokens, 1, batch * 128)
    beside = bench(file, 2, 20, "--vs", "llama.cpp", "--gguf", str(gguf))
    found = beside["vs"]["llama.cpp"]
    if batch > 1:
        if found.get("told"):
            options = re.search(r"-ngl \d+( -ncmoe \d+)?( -ub \d+)?", found["told"])
            assert options is not None
            found = time_batch(gguf, options.group().split(), prompt_tokens, batch)
        plan(row, file, prompt_tokens, batch, 128)
        beside = bench(file, 2, 20)
    keys = ("predicted", "measured", "experts")
    return {
        "llama_cpp": found,
        "offplan": {key: beside[key] for key in keys if key in beside},
    }


def measure_all(
    row: Row, folder: Path, workloads: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Measure a row's workloads with one file of weights; one that fails is part of the result."""
    gguf = folder / f"{row.name.split(',')[0]}.gguf"
    write(json.loads(Path(row.config, "config.json").read_text("utf-8")), gguf, TYPES[row.stored])
    try:
        for prompt_tokens, batch in workloads:
            try:
                found = measure(row, folder, gguf, prompt_tokens, batch)
            except subprocess.CalledProcessError as error:
                found = {"failed": error.stderr.splitlines()[-20:]}
            of = {"prompt_tokens": prompt_tokens, "batch": batch}
            yield {"model": row.name, "gpu_memory": row.gpu_memory, **of, **found}
    finally:
        gguf.unlink()


def read_workload(text: str) -> tuple[int, int]:
    """Read a workload: ``8192x4`` is four sequences of 8,192 tokens. Raises ValueError."""
    prompt_tokens, batch = map(int, text.split("x"))
    return prompt_tokens, batch


def main() -> None:
    """Measure the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--workloads", nargs="+", type=read_workload, default=[(512, 1)])
    args = parser.parse_args()
    rows = []
    for row in (row for name in args.names for row in ROWS if name in row.name):
        for found in measure_all(row, args.folder, args.workloads):
            rows.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
    print(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
