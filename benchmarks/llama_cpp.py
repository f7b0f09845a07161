"""Time plans beside llama.cpp at equal GPU memory, one row after another, as JSON.

    python -m benchmarks.llama_cpp FOLDER [NAME ...] [--prompt-tokens N --batch N] > rows.json

Needs a CUDA device, ``llama-bench`` on PATH, and for batches ``llama-batched-bench``. FOLDER gets
GGUF files of random weights, each removed behind its row: best one in memory, for 60 GB of
gpt-oss-120b. NAMEs pick rows by a part of their name. Batches are split as one sequence is whose
context is as long as all of them together.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
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


def measure(row: Row, folder: Path, prompt_tokens: int, batch: int) -> dict[str, Any]:
    """Measure both ways of a row."""
    file, gguf = folder / "plan.yaml", folder / f"{row.name.split(',')[0]}.gguf"
    config = json.loads(Path(row.config, "config.json").read_text("utf-8"))
    write(config, gguf, TYPES[row.stored])
    try:
        plan(row, file, batch * prompt_tokens, 1, batch * 128)
        beside = bench(file, 2, 20, "--vs", "llama.cpp", "--gguf", str(gguf))
        found = beside["vs"]["llama.cpp"]
        if batch > 1 and found.get("told"):
            options = re.search(r"-ngl \d+( -ncmoe \d+)?", found["told"])
            assert options is not None
            found = time_batch(gguf, options.group().split(), prompt_tokens, batch)
    finally:
        gguf.unlink()
    if batch > 1:
        plan(row, file, prompt_tokens, batch, 128)
        beside = bench(file, 2, 20)
    keys = ("predicted", "measured", "experts")
    return {
        "model": row.name,
        "gpu_memory": row.gpu_memory,
        "prompt_tokens": prompt_tokens,
        "batch": batch,
        "llama_cpp": found,
        "offplan": {key: beside[key] for key in keys if key in beside},
    }


def main() -> None:
    """Measure the rows; one that fails is part of the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    rows = []
    for row in (row for name in args.names for row in ROWS if name in row.name):
        print(row.name, file=sys.stderr, flush=True)
        try:
            rows.append(measure(row, args.folder, args.prompt_tokens, args.batch))
        except subprocess.CalledProcessError as error:
            rows.append({"model": row.name, "failed": error.stderr.splitlines()[-20:]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
