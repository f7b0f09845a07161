"""Run a plan's workload on random weights and print what it took, as JSON.

    python benchmarks/run_plan.py CONFIG_JSON [--rules JSON --batch 1 16 64 ...]

Needs a CUDA device, and a second one for ``--store peer``. Nothing is planned here: the rules come
from the command line, so that one thing can be varied at a time.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time

import torch

from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule
from offplan.runtime.measuring.bench import time_link
from offplan.runtime.session import Session
from offplan.transformers_private import list_experts


def describe_machine() -> dict[str, object]:
    import transformers

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def time_decode(session: Session, prompt: torch.Tensor, num_steps: int) -> dict[str, float]:
    """Time decode steps by CUDA events, one after another, after four that warm up."""
    with session.stream():
        tokens = session.prefill(prompt).argmax(-1, keepdim=True)
        for _ in range(4):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
        events[0].record()
        moved = session.link.bytes_moved
        for event in events[1:]:
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
            event.record()
        torch.cuda.synchronize()
    steps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return {
        "step_s": statistics.median(steps),
        "step_min_s": min(steps),
        "step_max_s": max(steps),
        "stream_mean_s": events[0].elapsed_time(events[-1]) / 1e3 / num_steps,
        "link_bytes": (session.link.bytes_moved - moved) / num_steps,
    }


def count_touched_experts(session: Session, prompt: torch.Tensor) -> float | None:
    """Distinct experts that a decode step behind ``prompt`` reads in a layer, on average."""
    counts: list[int] = []

    def count(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        counts.append(arguments[1].unique().numel())  # hidden states, indices, weights

    # those that transformers lets be multiplied in another way say what they have
    experts = list_experts(session.loaded.module)
    hooks = [m.register_forward_pre_hook(count) for m in experts]
    with session.stream(), torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        # hooks have layers compiled again, which must not happen in a capture
        (logits,) = session.prefill_all(prompt, 1)
        tokens = logits.argmax(-1)
        counts.clear()
        session.runner.forward.step(tokens)
        torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    return statistics.mean(counts) if counts else None


def time_prefill(session: Session, prompt: torch.Tensor, repeats: int = 3) -> dict[str, float]:
    seconds = []
    for _ in range(repeats + 2):  # the second one may be captured
        torch.cuda.synchronize()
        began = time.perf_counter()
        session.prefill(prompt)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"prefill_s": statistics.median(seconds[2:]), "prefill_first_s": seconds[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--rules", default="[]", help="JSON list of rules")
    parser.add_argument("--packing", type=Packing.model_validate_json, help="JSON")
    parser.add_argument("--prefetch-step", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--store", choices=("host", "peer"), default="host")
    parser.add_argument("--prefill", type=int, help="also time a prompt of this many tokens")
    args = parser.parse_args()
    model = open_model(args.config)
    rules = [Rule.model_validate(rule) for rule in json.loads(args.rules)]
    offload = Offload(
        prefetch_step=args.prefetch_step,
        prefill_chunk=args.prefill_chunk,
        store=args.store,
        packing=args.packing,
        rules=tuple(rules),
    )
    began = time.perf_counter()
    results = []
    with Session(model, offload, context=args.context, device="cuda") as session:
        load_s = time.perf_counter() - began
        loaded_bytes = session.gpu_bytes
        for batch in args.batch:
            prompt = torch.randint(0, 1000, (batch, args.prompt_tokens))
            results.append({"batch": batch, **time_decode(session, prompt, args.steps)})
            results[-1]["gpu_bytes"] = session.gpu_bytes
            if model.experts is not None:
                results[-1]["touched_experts"] = count_touched_experts(session, prompt)
        if args.prefill:
            prompt = torch.randint(0, 1000, (1, args.prefill))
            results.append({"batch": 1, **time_prefill(session, prompt)})
            results[-1]["gpu_bytes"] = session.gpu_bytes
        placement, peer = session.loaded.placement, session.loaded.store.slab_device
        report = {
            "config": args.config,
            "rules": json.loads(args.rules),
            "packing": args.packing and args.packing.model_dump(),
            "load_s": load_s,
            "loaded_gpu_bytes": loaded_bytes,
            "resident_bytes": placement.resident_bytes,
            "ring_bytes": placement.ring_bytes,
            "offloaded_bytes": placement.offloaded_bytes,
            "store": args.store,
            "peer": None if peer is None else str(peer),
            "peer_bytes": 0 if peer is None else torch.cuda.memory_allocated(peer),
            "slot_bytes": placement.slot_bytes,
            "link_bytes_per_s": time_link(session),
            "results": results,
            "machine": describe_machine(),
        }
    json.dump(report, sys.stdout)
    print()


if __name__ == "__main__":
    main()
