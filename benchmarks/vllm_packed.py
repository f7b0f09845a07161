"""vLLM with weights packed without loss beside its own bfloat16, as JSON, a file for each way.

    python -m benchmarks.vllm_packed FOLDER --results RESULTS [--plan PLAN[=FOLDER] ...]
        [--way NAME ...]

FOLDER is a bfloat16 checkpoint (``benchmarks.vllm_worker --synthesize`` writes one of random
values, meanwhile if need be). Ways are ``resident``, ``packed`` (``--quantization
offplan_packed``), and each plan by the name of its file (made ``--for vllm-worker``), which runs
with the plan's own context and batch;
``=FOLDER`` is the checkpoint of a plan for another model.
``NAME-compiled`` is the same with layers compiled, which starts later, and ``resident-tp2`` vLLM's
own on two GPUs. The default is all but that, and of vLLM alone the compiled ones, last. Needs a
CUDA device and vLLM; GPU memory is that of the first device, and at the end of each.

A way's process starts while the way before it is measured, imports vLLM and waits: it has no CUDA
until its turn, from which on ``start_s`` counts. Each leaves ``RESULTS/WAY.part.json`` as soon as
anything is measured, more of it after each measurement, and ``WAY.json`` once it is whole. A way
that is there whole is not run again. A step is the least time of generating ``--steps`` tokens more
than one, less the least time of one, over those; all sequences of a batch have prompts of the first
of ``--prompts``. A first token's time is the least of ``--repeats``, one sequence. GPU memory is
what the card says is in use, beyond what was when the way began: its peak until the weights are
loaded, what is in use then, and after the measurements. Greedy tokens are compared with those of
the first way of the same checkpoint, where both had prompts of one size; the gap is that of the two
likeliest tokens' log-probabilities, in the way's own run, where the tokens first differ.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_worker import (
    LOG_LINES,
    WHOLE_GRAPHS,
    compare,
    count_taken,
    describe,
    end,
    keep_told,
    read_used_bytes,
    say_way,
    start,
    start_vllm,
    wait_for,
)
from offplan.checkpoint.open import open_model
from offplan.engines.taken import QUANTIZATION
from offplan.plan import load_plan

WAYS = ("resident", "packed")
COMPILED = "-compiled"
ON_TWO = "-tp2"
CACHE_BYTES = 8 * 2**30
MARGIN_TOKENS = 128
"""Tokens of context beyond the longest prompt."""
SETTLED_BYTES = 2**30
"""GPU memory that may be in use when a way begins: the way before it has closed down."""
SETTLES_S = 15
INDEX_NAME = "model.safetensors.index.json"
IMPORTED = (
    *("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.executor.uniproc_executor", "vllm.v1.worker.gpu_worker", "offplan.vllm_packed"),
    *("offplan.vllm", "offplan.runtime.forms.operators", "vllm.v1.attention.backends.flash_attn"),
    *("vllm.model_executor.models.qwen3", "vllm.model_executor.models.deepseek_v2"),
)
"""What a process imports before its turn, and forks to vLLM's engine."""
LOADED = re.compile(r"Model loading took ([\d.]+) GiB memory and ([\d.]+) seconds")


def find_words(way: str, args: argparse.Namespace) -> tuple[list[str], list[int], list[int]]:
    """The words after ``vllm serve`` for a way, and the batches and prompts to time."""
    plan, base = find_plan(way, args), way.removesuffix(COMPILED)
    folder = find_folder(way, args)
    if plan is None:
        batches, prompts = args.batches, args.prompts
        words = ["--model", str(folder), "--dtype", "bfloat16"]
        words += ["--max-model-len", str(max(prompts) + MARGIN_TOKENS)]
        words += ["--max-num-seqs", str(max(batches)), "--max-num-batched-tokens"]
        words += [str(max(prompts)), "--kv-cache-memory-bytes", str(args.cache_bytes)]
        words += ["--skip-tokenizer-init", "--no-enable-prefix-caching"]
        words += ["--quantization", QUANTIZATION] if base == "packed" else []
        words += ["--tensor-parallel-size", "2"] if base.endswith(ON_TWO) else []
        if open_model(str(folder)).experts is not None:  # the kernels that plans ask for
            words += ["--moe-backend", "triton"]
    else:
        workload = load_plan(plan).workload
        batches, prompts = [workload.batch], [workload.prompt_tokens]
        words = say_way("worker", plan, None, folder, "")
    compilation = {**json.loads(WHOLE_GRAPHS), "cudagraph_capture_sizes": batches}
    if not way.endswith(COMPILED):
        compilation["mode"] = 0
    return [*words, "--compilation-config", json.dumps(compilation)], batches, prompts


def find_plan(way: str, args: argparse.Namespace) -> Path | None:
    """The plan that a way runs; None where it is vLLM alone."""
    paths = (Path(each.partition("=")[0]) for each in args.plan)
    return next((path for path in paths if path.stem == way.removesuffix(COMPILED)), None)


def find_folder(way: str, args: argparse.Namespace) -> Path:
    """The checkpoint that a way runs."""
    plan = find_plan(way, args)
    given = (each.partition("=") for each in args.plan)
    named = next((folder for path, _, folder in given if plan and Path(path) == plan), "")
    return Path(named) if named else args.folder


def run_way(args: argparse.Namespace) -> None:
    """Run one way in this process, which has not used CUDA yet, and write what it measures."""
    for each in IMPORTED:
        with suppress(ImportError):  # only to have it early
            import_module(each)
    print(f"imported after {time.time() - args.began:.1f} s", flush=True)
    if not sys.stdin.readline():
        return  # its turn does not come
    began = time.time()
    before = read_used_bytes()
    words, batches, prompts = find_words(args.run, args)
    found: dict[str, Any] = {
        **{"way": args.run, "folder": str(find_folder(args.run, args)), "options": words},
        "imports_s": began - args.began,
    }

    def keep(**more: Any) -> None:
        found.update(more, **count_taken(before))
        part = args.partial.with_suffix(".new")
        part.write_text(json.dumps(found))
        part.rename(args.partial)  # it appears whole

    engine = start_vllm(words)
    keep(start_s=time.time() - began)

    from vllm import SamplingParams

    noise = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 1000, (max(batches), max(prompts)), generator=noise).tolist()

    def generate(num_tokens: int, batch: int, size: int, **more: Any) -> Any:
        given = [{"prompt_token_ids": text[:size]} for text in texts[:batch]]
        likeliest = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **more
        )
        return [made.outputs[0] for made in engine.generate(given, likeliest, use_tqdm=False)]

    def least(*asked: int) -> float:
        seconds = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            generate(*asked)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    (made,) = generate(args.tokens, 1, prompts[0])
    keep(tokens=[*made.token_ids], prompt_tokens=prompts[0])
    first_tokens_s: dict[int, float] = {}
    steps_s: dict[int, float] = {}
    for batch in batches:
        first = least(1, batch, prompts[0])
        steps_s[batch] = (least(1 + args.steps, batch, prompts[0]) - first) / args.steps
        if batch == 1:
            first_tokens_s[prompts[0]] = first
        keep(steps_s=steps_s, first_tokens_s=first_tokens_s)
    for size in prompts[1:]:
        generate(1, 1, size)
        first_tokens_s[size] = least(1, 1, size)
        keep(first_tokens_s=first_tokens_s)
    (made,) = generate(args.tokens, 1, prompts[0], logprobs=2)
    likely = [sorted((p.logprob for p in each.values()), reverse=True) for each in made.logprobs]
    keep(gaps=[best[0] - best[1] for best in likely])
    args.partial.rename(args.result)


def prepare(way: str, args: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """Start the process of a way, which imports what it needs and waits for its turn."""
    command = [sys.executable, "-m", "benchmarks.vllm_packed", *sys.argv[1:], "--run", way]
    command += ["--result", str(args.results / f"{way}.json"), "--began", str(time.time())]
    command += ["--partial", str(args.results / f"{way}.part.json")]
    return start(command, args.results / f"{way}.log")


def wait_for_memory() -> int:
    """Wait until the way before has given back the card's memory; return what is in use."""
    until = time.time() + SETTLES_S
    while max(used := read_used_bytes()) > SETTLED_BYTES and time.time() < until:
        time.sleep(0.05)
    return used[0]


def run_alone(
    process: "subprocess.Popen[bytes]",
    way: str,
    args: argparse.Namespace,
    ends: float,
    measuring: Callable[[], object],
) -> dict[str, Any]:
    """Let a prepared way have its turn, and watch what loading takes of the card's memory.

    ``measuring`` is called once it has started.
    """
    print(f"{way}, {ends - time.time():.0f} s left", file=sys.stderr, flush=True)
    result, log = args.results / f"{way}.json", args.results / f"{way}.log"
    partial = args.results / f"{way}.part.json"
    partial.unlink(missing_ok=True)
    index = find_folder(way, args) / INDEX_NAME  # what writes a checkpoint writes that last
    while not index.exists() and time.time() < ends:
        time.sleep(0.05)
    before, peak, loaded, is_measuring = wait_for_memory(), 0, 0, False
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()

    def watch() -> None:
        nonlocal peak, loaded, is_measuring
        if not is_measuring and partial.exists():
            is_measuring = True
            measuring()
        if not loaded:
            used = read_used_bytes()[0] - before
            peak = max(peak, used)
            if LOADED.search(log.read_text(errors="replace")):
                loaded = used

    lines = wait_for(process, result, log, min(ends, time.time() + args.most), watch)
    found: dict[str, Any] = {"way": way}
    written = result if result.exists() else partial
    if written.exists():
        found |= json.loads(written.read_text())
    if not result.exists():
        found["failed"] = lines[-LOG_LINES:]
    found |= {"peak_loading_bytes": peak, "loaded_bytes": loaded, "said": keep_told(lines)}
    if told := LOADED.search("\n".join(lines)):
        found |= {"weights_gib": float(told[1]), "load_s": float(told[2])}
    if (plan := find_plan(way, args)) is not None:
        said = load_plan(plan).prediction
        found["predicted"] = {
            "step_s": said.decode.step_s,
            "first_token_s": said.prefill.step_s,
            "gpu_bytes": said.gpu_memory.total_bytes,
        }
    written.write_text(json.dumps(found))
    return found


def run_all(chosen: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what has no result yet, one way after the other, each prepared beside the one before."""
    ends = time.time() + args.limit
    missing = [way for way in chosen if not (args.results / f"{way}.json").exists()]
    prepared: dict[str, subprocess.Popen[bytes]] = {}

    def prepare_first(ways: list[str]) -> None:
        for way in ways[:1]:
            prepared.setdefault(way, prepare(way, args))

    try:
        for place, way in enumerate(missing):
            if ends - time.time() < args.least:
                print(f"no time for {way}", file=sys.stderr, flush=True)
                break
            prepare_first([way] if way not in prepared else [])
            later = missing[place + 1 :]
            run_alone(prepared.pop(way), way, args, ends, partial(prepare_first, later))
    finally:
        for process in prepared.values():
            end(process)
    ways = []
    for way in chosen:
        paths = (args.results / f"{way}{ending}" for ending in (".json", ".part.json"))
        if (path := next((each for each in paths if each.exists()), None)) is not None:
            ways.append(json.loads(path.read_text()))
    return ways


def compare_each(ways: list[dict[str, Any]]) -> None:
    """Compare the tokens of each checkpoint's ways, where prompts were of one size."""
    with_tokens = [way for way in ways if "tokens" in way]
    for folder in dict.fromkeys(way["folder"] for way in with_tokens):
        of = [way for way in with_tokens if way["folder"] == folder]
        compare([way for way in of if way["prompt_tokens"] == of[0]["prompt_tokens"]])


def main() -> None:
    """Run what has no result yet, then print one JSON document of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--plan", nargs="*", default=[], metavar="PLAN[=FOLDER]")
    parser.add_argument("--way", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--cache-bytes", type=int, default=CACHE_BYTES, help="of the KV cache")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to compare")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=400, help="seconds for everything")
    parser.add_argument("--most", type=float, default=150, help="seconds for one way")
    parser.add_argument("--least", type=float, default=30, help="seconds left to begin a way with")
    for name, kind in {"run": str, "result": Path, "partial": Path, "began": float}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        run_way(args)
        return
    args.results.mkdir(parents=True, exist_ok=True)
    names = [*WAYS, *(Path(each.partition("=")[0]).stem for each in args.plan)]
    chosen = args.way or [*names, *(f"{way}{COMPILED}" for way in reversed(WAYS))]
    ways = run_all(chosen, args)
    compare_each(ways)
    document = {"folder": str(args.folder), "ways": ways, "machine": describe()}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
