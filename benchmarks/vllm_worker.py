"""One model in vLLM, resident, by flags and by a plan, and in offplan's own runtime, as JSON.

    python -m benchmarks.vllm_worker FOLDER --plan PLAN [--flags-plan PLAN] [--way NAME ...]
    python -m benchmarks.vllm_worker FOLDER --synthesize CONFIG_JSON

FOLDER is a checkpoint; ``--synthesize`` writes one there, of random values. ``--plan`` is what
vLLM's worker and offplan run, made ``--for vllm-worker`` for one sequence; ``--flags-plan``, made
with ``--for vllm``, is what vLLM's flags say. Needs a CUDA device and vLLM.

Each way runs in a process of its own. All are given the same prompt and take the likeliest tokens;
what they generate is compared with the first way's. Of random weights two tokens are at times as
close as other kernels round, so offplan's gap between them is told where its tokens first differ.
A token's time is the difference between generating one and ``--steps`` more, over those, by the
host's clock, and the median of ``--repeats``. GPU memory is what the card says is in use when all
is done, beyond what was when the way began: everything that its processes take. vLLM is given the
plan's context and a KV cache for it, and captures whole graphs of decode steps, within which alone
copies go on from layer to layer. ``--vllm`` adds options (``--vllm=--enforce-eager``); of two that
contradict the later one counts.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import synthesize
from benchmarks.run_plan import describe_machine
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines.engine import join_flags
from offplan.engines.export import export_plan
from offplan.engines.runner import find_runner
from offplan.engines.vllm import VLLM
from offplan.held.held import hold_whole
from offplan.library.sessions import open_session
from offplan.plan import Plan, load_plan
from offplan.runtime.generate import generate

WAYS = ("resident", "flags", "worker", "offplan")
EXPORTED = {"flags": "vllm", "worker": "vllm-worker"}
WHOLE_GRAPHS = '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
DEVIATION = 0.02
"""Standard deviation of the values of a model that nobody has trained yet: Qwen3's."""
GRACE_S = 20
"""Seconds that a way has for closing down once its result is there."""
LOG_LINES = 25
TOLD = (
    *("offplan:", "Offloader", "attention backend", "FlashAttention", "torch.compile took"),
    *("Loading weights took", "Model loading took", "We must use the `spawn`"),
)
"""What lines of vLLM's log have that are kept."""

Generate = Callable[[int], list[int]]
"""Generates so many tokens after the prompt."""


def say_way(way: str, plan: Path, flags_plan: Path | None, folder: Path, more: str) -> list[str]:
    """The words after ``vllm serve`` for one way; raises OffplanError where there are none."""
    chosen = load_plan(flags_plan or plan) if way == "flags" else load_plan(plan)
    model = open_model(str(folder))
    stage = hold_whole(model, find_runner("vllm"))
    words = ["--model", str(folder), *join_flags(VLLM.serve(chosen, [stage], None))]
    words += join_flags(VLLM.divide(chosen.goal.ranks))
    words += ["--skip-tokenizer-init", "--no-enable-prefix-caching"]
    words += ["--compilation-config", WHOLE_GRAPHS]
    if model.experts is not None:
        words += ["--moe-backend", "triton"]
    if way in EXPORTED:
        words += export_plan(chosen, model, EXPORTED[way], file=plan).flags
    return words + shlex.split(more)


def start_vllm(words: list[str]) -> Any:
    """Start vLLM by the words after ``vllm serve``; return its ``LLM``."""
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(words)))


@contextmanager
def open_vllm(words: list[str], prompt: list[int]) -> Iterator[Generate]:
    from vllm import SamplingParams

    engine = start_vllm(words)

    def run(num_tokens: int) -> list[int]:
        likeliest = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        (made,) = engine.generate({"prompt_token_ids": prompt}, likeliest, use_tqdm=False)
        return [*made.outputs[0].token_ids]

    yield run


@contextmanager
def open_offplan(
    plan: Plan, model: Model, prompt: list[int], gaps: list[float]
) -> Iterator[Generate]:
    """``gaps`` hears how far the two likeliest tokens were apart, in deviations of the logits."""
    with open_session(plan, model=model) as session:
        session.warm_up(1, len(prompt))
        found: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, _: object) -> torch.Tensor:
            best = logits.float().topk(2).values[0]
            found.append((best[0] - best[1]) / logits.float().std())
            return logits.argmax(-1, keepdim=True)

        def run(num_tokens: int) -> list[int]:
            text = torch.tensor([prompt])
            if gaps:
                return [int(token) for token in generate(session, text, num_tokens)]
            tokens = [int(t) for t in generate(session, text, num_tokens, choose=choose)]
            gaps.extend(torch.stack(found).tolist())
            return tokens

        yield run


def read_used_bytes() -> list[int]:
    """What the driver says is in use on each GPU that this process may use.

    ``torch.cuda.device_memory_used`` would initialise CUDA in the process, and vLLM could no longer
    fork its engine: it starts it anew, which takes as long as all imports.
    """
    pynvml = import_module("pynvml")  # which need not be there to check types
    places = [torch.cuda._get_nvml_device_index(i) for i in range(torch.cuda.device_count())]
    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, places)
        return [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def count_taken(before: Sequence[int]) -> dict[str, Any]:
    """Count the bytes in use on the first GPU and on each, beyond what was in use ``before``."""
    taken = [now - then for now, then in zip(read_used_bytes(), before, strict=True)]
    return {"gpu_bytes": taken[0], "gpus_bytes": taken}


def measure(run: Generate, num_tokens: int, num_steps: int, repeats: int) -> dict[str, Any]:
    def seconds(count: int) -> float:
        began = time.perf_counter()
        run(count)
        return time.perf_counter() - began

    tokens = run(num_tokens)
    run(1 + num_steps)
    firsts, steps = [], []
    for _ in range(repeats):
        firsts.append(seconds(1))
        steps.append((seconds(1 + num_steps) - firsts[-1]) / num_steps)
    return {
        "first_token_s": statistics.median(firsts),
        "step_s": statistics.median(steps),
        "first_tokens_s": firsts,
        "steps_s": steps,
        "tokens": tokens,
    }


def run_way(args: argparse.Namespace) -> dict[str, Any]:
    """Run one way in this process, which has not used CUDA yet."""
    before = read_used_bytes()
    plan, gaps = load_plan(args.plan), list[float]()
    model = open_model(str(args.folder))
    size = plan.workload.prompt_tokens
    prompt = torch.randint(0, 1000, (size,), generator=torch.Generator().manual_seed(0)).tolist()
    if args.run == "offplan":
        words = []
        opened = open_offplan(plan, model, prompt, gaps)
    else:
        words = say_way(args.run, args.plan, args.flags_plan, args.folder, args.vllm)
        opened = open_vllm(words, prompt)
    with opened as run:
        start_s = time.time() - args.began
        found = measure(run, args.tokens, args.steps, args.repeats)
        found |= count_taken(before)
    return {"start_s": start_s, "options": words, **found, "gaps": gaps}


def run_alone(way: str, args: argparse.Namespace, ends: float) -> dict[str, Any]:
    """Run one way in a process of its own; a failure is part of the result."""
    print(f"{way}, {ends - time.time():.0f} s left", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.vllm_worker", *sys.argv[1:]]
        command += ["--run", way, "--result", str(result), "--began", str(time.time())]
        lines = run_until(command, result, Path(folder) / "log", ends)
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / f"{way}.log").write_text("\n".join(lines))
        if not result.exists():
            return {"way": way, "failed": lines[-LOG_LINES:], "said": keep_told(lines)}
        return {"way": way, **json.loads(result.read_text()), "said": keep_told(lines)}


def run_until(command: list[str], result: Path, log: Path, ends: float) -> list[str]:
    """Run a command until its result is there; return the lines of its log.

    What it started is ended with it, and all of it where the time is over.
    """
    return wait_for(start(command, log), result, log, ends, grace_s=GRACE_S)


def start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own, with which the engine's processes are ended, too."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(
    process: "subprocess.Popen[bytes]",
    result: Path,
    log: Path,
    ends: float,
    watch: Callable[[], object] = lambda: None,
    *,
    grace_s: float = 0,
) -> list[str]:
    """Wait, ``watch`` beside it, until a process has left its result; then end it.

    It has ``grace_s`` seconds to close down by itself. Returns the lines of its log.
    """
    while process.poll() is None and time.time() < ends and not result.exists():
        watch()
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s if result.exists() else 0)
    end(process)
    return log.read_text(errors="replace").splitlines()


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def keep_told(lines: list[str]) -> list[str]:
    return [line.rpartition("] ")[2] for line in lines if any(each in line for each in TOLD)]


def compare(ways: list[dict[str, Any]]) -> None:
    """Say where each way's tokens first differ from those of the first way that ran."""
    ran = [way for way in ways if "tokens" in way]
    for way in ran:
        pairs = enumerate(zip(ran[0]["tokens"], way["tokens"], strict=True))
        way["first_difference"] = next((i for i, (a, b) in pairs if a != b), None)
        if (gaps := way.pop("gaps", [])) and (at := way["first_difference"]) is not None:
            way["gap_there"], way["gap_median"] = gaps[at], statistics.median(gaps)


def describe() -> dict[str, object]:
    needs = [each for each in requires("vllm") or () if each.startswith("torch==")]
    return {**describe_machine(), "vllm": version("vllm"), "vllm_asks_for": needs}


def main() -> None:
    """Print one JSON document: every way, and the machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synthesize", type=Path, metavar="CONFIG_JSON")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--flags-plan", type=Path)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to compare")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", default="", help="more options for vLLM, in one word")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything")
    parser.add_argument("--logs", type=Path, help="keep each way's log in this folder")
    for name, kind in {"run": str, "result": Path, "began": float}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.synthesize is not None:
        synthesize(args.synthesize, args.folder, DEVIATION)
        return
    if args.plan is None:
        parser.error("--plan is missing")
    if args.run is not None:
        found = json.dumps(run_way(args))
        part = args.result.with_suffix(".part")
        part.write_text(found)
        part.rename(args.result)  # it appears whole
        return
    ends = time.time() + args.limit
    ways = [run_alone(way, args, ends) for way in args.way]
    compare(ways)
    json.dump({"folder": str(args.folder), "ways": ways, "machine": describe()}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
