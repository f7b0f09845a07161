"""A KV cache in FP8 beside one as the model computes it: steps, bytes and logits, as JSON.

    python -m benchmarks.kv_cache [CONFIG ...] > benchmarks/results/kv-cache-h200.json

Needs a CUDA device, or ``--device cpu`` for tiny models. CONFIGs are files or folders of models;
gpt-oss-20b, Qwen3-8B and DeepSeek-V2-Lite by default. Of each, the first layers run, all on the
GPU, on the same random weights with either cache. No prompt is read: the cache is filled with
random normal numbers, the same for both, as codes in FP8. A session has room for the longest
filling, and each step is captured. Differences of logits are those of random weights and states.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_and_prefill import LITE, OSS, QWEN
from benchmarks.run_plan import describe_machine
from offplan.capabilities.way import OWN
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.held.held import hold
from offplan.plan import Offload, Workload
from offplan.row_cache import SCALE_BYTES
from offplan.runtime.device import settle
from offplan.runtime.measuring.timed_link import mark, seconds_between
from offplan.runtime.model.cache_codes import encode, is_coded
from offplan.runtime.session import NUM_WARMUP_STEPS, Session

WAYS = {"auto": OWN, "fp8": replace(OWN, kv_cache_dtype="fp8")}


def fill(session: Session) -> None:
    """Write random numbers over each layer's keys and values: as codes where these are kept."""
    dtype = session.loaded.module.dtype
    for index, layer in enumerate(session.runner.layers.cache.by_layer):
        for which, kept in enumerate((layer.keys, layer.values)):
            generator = torch.Generator(kept.device).manual_seed(2 * index + which)
            width = kept.shape[-1] - SCALE_BYTES * is_coded(kept)
            for row in kept:  # encoding takes floats of all that it encodes
                for head in row:
                    shape = len(head), width
                    states = torch.randn(shape, generator=generator, device=kept.device).to(dtype)
                    head.copy_(encode(states) if is_coded(kept) else states)


def time_steps(
    session: Session, batch: int, filled: int, num_steps: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Time decode steps behind so many filled tokens; return the first one's logits beside it."""
    tokens = torch.arange(1, batch + 1, device=session.device)[:, None]
    with session.stream(), torch.inference_mode():
        session.runner.set_length(filled)
        logits = session.decode(tokens).float().cpu()
        for _ in range(NUM_WARMUP_STEPS + 1):
            session.decode(tokens)
        moments = [mark(session.device)]
        for _ in range(num_steps):
            session.decode(tokens)
            moments.append(mark(session.device))
        settle(session.device)
    seconds = [seconds_between(*pair) for pair in itertools.pairwise(moments)]
    report = {"step_s": statistics.median(seconds), "step_min_s": min(seconds)}
    return {**report, "step_max_s": max(seconds), "has_nan": bool(logits.isnan().any())}, logits


def run_cache(
    model: Model, name: str, args: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Time one way to keep the cache, and yield what each batch and filling took."""
    way = WAYS[name]
    context = max(args.filled) + NUM_WARMUP_STEPS + args.steps + 2
    offload = Offload(prefill_chunk=512)
    with Session(model, offload, context=context, device=args.device, way=way) as session:
        for batch in args.batch:
            with session.stream(), torch.inference_mode():
                session.runner.allocate(batch)
                fill(session)
            workload = Workload(
                batch=batch, context=context, prompt_tokens=context - 1, output_tokens=1
            )
            cache = {
                "cache": name,
                "batch": batch,
                "cache_bytes_predicted": hold(model, way=way).cache_bytes(workload),
                "cache_bytes_allocated": sum(
                    part.nbytes for part in session.runner.layers.cache.tensors()
                ),
            }
            for filled in args.filled:
                steps, logits = time_steps(session, batch, filled, args.steps)
                yield {**cache, "filled": filled, **steps}, logits


def compare(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run both caches; yield what each case took, with FP8's beside what the model computes."""
    plain = []
    for case in run_cache(model, "auto", args):
        plain.append(case)
        yield case[0]
    free(args.device)
    for (known, logits), (report, coded) in zip(plain, run_cache(model, "fp8", args), strict=True):
        difference = (coded - logits).abs()
        report["largest_difference"] = float(difference.max() / logits.abs().max())
        report["mean_difference"] = float(difference.mean() / logits.abs().mean())
        report["same_token"] = float((coded.argmax(-1) == logits.argmax(-1)).float().mean())
        report["speed"] = known["step_s"] / report["step_s"]
        yield report
    free(args.device)


def free(device: str) -> None:
    """Give back the memory of a session that was closed."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each model; one that fails is part of the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="*", default=[OSS, QWEN, LITE])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--filled", type=int, nargs="*", default=[8192, 32_768, 131_072])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    results = []
    for config in args.configs:
        began, cases = time.perf_counter(), list[dict[str, Any]]()
        result: dict[str, Any] = {"config": config, "cases": cases}
        results.append(result)
        try:
            model = open_model(str(Path(config).resolve()))
            for case in compare(replace(model, layers=model.layers[: args.layers]), args):
                cases.append(case)
                print(config, json.dumps(case), file=sys.stderr, flush=True)
        except Exception:
            result["failed"] = traceback.format_exc().splitlines()[-60:]
            print(*result["failed"], sep="\n", file=sys.stderr, flush=True)
        result["took_s"] = round(time.perf_counter() - began, 1)
    machine = describe_machine() if args.device == "cuda" else {"torch": torch.__version__}
    filling = "random normal numbers, not a prompt's"
    report = {"machine": machine, "layers": args.layers, "cache": filling, "models": results}
    json.dump(report, sys.stdout)
    print()


if __name__ == "__main__":
    main()
