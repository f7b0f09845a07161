"""Time FreeToken and offplan with the same GPU memory, as the same traces route tokens.

    python -m benchmarks.peers_freetoken CONFIG_JSON --gpu-memory '8 GiB' [--only NAME ...]

FreeToken 0.1.3 must be installed, and the model be a gpt-oss, whose choices can be replaced. Both
sides have random weights in the model's own form, and what routers choose is taken from a trace.
Each way to run takes a process of its own, in turn. FreeToken is shown a GPU of as much memory
as offplan plans for, and sizes its cache by it. Prints JSON: the settings, the memory of the GPU
that the process took, and the time of steps for each reuse.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.replay import ReplaySession, draw, read_config, run
from benchmarks.run_plan import describe_machine
from offplan.checkpoint.model import Model
from offplan.library.asking import ask
from offplan.library.machines import find_machine
from offplan.plan import Workload
from offplan.planner.make import make_plan
from offplan.units import parse_bytes

REUSES = ("published", "none")
SPARE_STEPS = 16
"""Steps of a trace beyond those timed: FreeToken queues one more than it was asked for."""

FULL: dict[str, Any] = {
    "moe_cache_auto": True,
    "memory_ratio": 0.96,
    "kv_reserve_tokens": 1024,
    "max_running_req": 1,
}
"""Memory given to experts: one sequence, a small KV cache, little left for what a step takes."""

PEERS: dict[str, dict[str, Any]] = {
    "automatic": {},
    "automatic, its benchmark run": {},
    "offload": {"moe_strategy": "offload", **FULL},
    "hybrid": {"moe_strategy": "hybrid", **FULL},
    "cpu": {"moe_strategy": "cpu", "max_running_req": 1},
}
"""Settings of FreeToken's engine, by name; whatever is left out is its own choice."""

WITH_PROFILE = ("automatic, its benchmark run", "hybrid")
OURS = ("offplan", "offplan, with a routing profile")


def write_folder(config: Path, folder: Path) -> None:
    """Write what FreeToken reads beside weights: the config and a tokenizer of single bytes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.read_text("utf-8"), "utf-8")
    words = {"<eos>": 0} | {f"<{byte}>": 1 + byte for byte in range(256)}
    Tokenizer(WordLevel(words, unk_token="<eos>")).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


class RoutedByTrace:
    """Has FreeToken's gpt-oss layers choose as a trace says, and marks the begin of each step."""

    def __init__(self, num_layers: int, num_tokens: int, prompt: int, choices: int) -> None:
        """Take the sizes of the trace; patches FreeToken's classes."""
        sizes = num_layers, num_tokens, choices
        self.trace = torch.zeros(sizes, dtype=torch.int32, device="cuda")
        self.step = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.events: list[torch.cuda.Event] = []
        layers = importlib.import_module("freetoken.models.gpt_oss.moe").GptOssOffloadMoELayer
        runner = importlib.import_module("freetoken.engine.graph").GraphRunner
        multiply, replay = layers.routed_forward, runner.replay

        def choose(
            layer: Any, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
        ) -> torch.Tensor:
            row = self.trace[layer.layer_id]
            if len(chosen) == prompt:
                chosen = row[:prompt].clone()  # FreeToken writes slots over it
            else:
                step = row[prompt:].index_select(0, self.step)
                chosen = step.expand(len(chosen), choices).contiguous()
            return multiply(layer, rows, weights, chosen)

        def mark(graphs: Any, batch: Any) -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
            out = replay(graphs, batch)
            self.step.add_(1)
            return out

        layers.routed_forward, runner.replay = choose, mark

    def begin(self, trace: torch.Tensor) -> None:
        """Go by another trace, [layers, tokens, choices], from its first step on."""
        torch.cuda.synchronize()
        self.trace.copy_(trace)
        self.step.zero_()
        self.events.clear()
        torch.cuda.synchronize()


def show_smaller_gpu(num_bytes: int) -> None:
    """Have torch report a GPU of so many bytes, of which this process has taken what it has."""
    real = torch.cuda.mem_get_info

    def report(device: Any = None) -> tuple[int, int]:
        free, total = real(device)
        return num_bytes - (total - free), num_bytes

    setattr(torch.cuda, "mem_get_info", report)  # noqa: B010


def fill_banks_quickly() -> None:
    """Have dummy experts be copies of one block of noise: torch draws bytes on one core."""
    noise = torch.randint(0, 256, (16_777_213,), dtype=torch.uint8)
    draw_values = torch.Tensor.random_

    def fill(values: torch.Tensor, *limits: Any, **more: Any) -> torch.Tensor:
        if values.device.type != "cpu" or values.dtype != torch.uint8 or limits != (0, 256):
            return draw_values(values, *limits, **more)
        flat = values.view(-1)
        for part in flat.split(len(noise)):
            part.copy_(noise[: len(part)])
        return values

    setattr(torch.Tensor, "random_", fill)  # noqa: B010


def taken_bytes() -> int:
    """Memory of the GPU that is taken; this process is the only one that takes any."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def run_freetoken(options: argparse.Namespace, model: Model, name: str) -> dict[str, Any]:
    """Start FreeToken's engine by some settings and time steps behind prompts."""
    traces = draw_traces(options, model)
    budget = parse_bytes(options.gpu_memory)
    show_smaller_gpu(budget)
    fill_banks_quickly()
    core = importlib.import_module("freetoken.core")
    began = time.perf_counter()
    llm = importlib.import_module("freetoken.llm").LLM
    routed: list[RoutedByTrace] = []
    engines = importlib.import_module("freetoken.engine.engine")
    loads = engines.Engine._load_weight_state_dict

    def load(engine: Any, config: Any) -> Any:  # CUDA may not be initialised any earlier
        layers, tokens, choices = next(iter(traces.values())).shape
        routed.append(RoutedByTrace(layers, tokens, options.prompt, choices))
        return loads(engine, config)

    engines.Engine._load_weight_state_dict = load
    peer = llm(str(options.folder), use_dummy_weight=True, **PEERS[name])
    start_s = time.perf_counter() - began

    def generate(num_tokens: int, seed: int) -> float:
        asked = core.SamplingParams(ignore_eos=True, max_tokens=num_tokens)
        random = torch.Generator().manual_seed(seed)
        prompt = torch.randint(1, 1000, (options.prompt,), generator=random).tolist()
        begun = time.perf_counter()
        found = peer.generate([prompt], asked)
        torch.cuda.synchronize()
        if len(found[0]["token_ids"]) < num_tokens - 1:  # an end as the last one is left out
            raise SystemExit(f"FreeToken made {len(found[0]['token_ids'])}, not {num_tokens}")
        return time.perf_counter() - begun

    (by_trace,) = routed
    runs: dict[str, list[dict[str, float]]] = {reuse: [] for reuse in traces}
    by_trace.begin(traces[REUSES[0]])
    generate(9, 0)
    for number in range(options.rounds):
        for at, (reuse, trace) in enumerate(traces.items()):
            by_trace.begin(trace)  # a prompt of its own: what is shared with one before is not read
            whole_s = generate(options.steps + 1, 1 + number * len(traces) + at)
            marks = by_trace.events[: options.steps]
            steps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
            runs[reuse].append({**sum_up(steps), "whole_s": whole_s})
    engine = peer.engine
    settings = {
        key: getattr(engine.config, key)
        for key in ("moe_strategy", "attention_backend", "moe_cache_size", "memory_ratio")
    }
    settings["kv_tokens"] = engine.num_pages * engine.config.page_size
    cache = engine.moe_offload_cache
    settings["hybrid_max_fetch"] = cache.hybrid_max_fetch
    settings["hybrid_fetch_fraction"] = getattr(cache, "hybrid_fetch_fraction", None)
    if (cores := engine.cpu_moe_executor) is not None:
        settings |= {"cores": cores.num_threads, "instructions": str(cores.isa)}
    taken = budget - torch.cuda.mem_get_info()[0]
    return {"settings": settings, "start_s": start_s, "taken_bytes": taken, "runs": runs}


def sum_up(steps: Sequence[float]) -> dict[str, float]:
    """Sum up the times of steps, in seconds."""
    mean = statistics.mean(steps)
    return {
        "step_s": statistics.median(steps),
        "step_mean_s": mean,
        "step_max_s": max(steps),
        "tokens_per_s": 1 / mean,
    }


def run_offplan(options: argparse.Namespace, model: Model, name: str) -> dict[str, Any]:
    """Plan for the memory, and time steps of the plan."""
    traces = draw_traces(options, model)
    context = options.prompt + options.steps + SPARE_STEPS
    workload = Workload(
        batch=1, prompt_tokens=options.prompt, output_tokens=options.steps + 1, context=context
    )
    machine = find_machine(options.machine, model, workload)
    assert machine is not None, "name a machine with --machine where there is no GPU"
    question = ask(
        model,
        machine,
        workload,
        gpu_memory=parse_bytes(options.gpu_memory),
        routing=None if name == OURS[0] else str(options.folder / "routing.json"),
    )
    plan = make_plan(question).plan
    first = next(iter(traces.values())).unsqueeze(2).long()
    prompt = torch.arange(options.prompt).view(1, -1) % 1000 % 60
    runs: dict[str, list[dict[str, Any]]] = {reuse: [] for reuse in traces}
    began = time.perf_counter()
    session = ReplaySession(
        first, options.prompt, model, plan.offload, context=context, device=options.device
    )
    start_s = time.perf_counter() - began
    session.warm_up(*prompt.shape)
    for _ in range(options.rounds):
        for reuse, trace in traces.items():
            set_trace(session, trace, options.prompt)
            found = run(session, prompt, options.steps)
            runs[reuse].append(
                {key: found[key] for key in ("step_s", "step_mean_s", "step_max_s")}
                | {"tokens_per_s": 1 / found["step_mean_s"], "prompt_s": found["prompt_s"]}
                | {key: sum(found[key].values()) for key in ("hits", "misses", "by_cores", "later")}
            )
    return {
        "settings": plan.offload.model_dump(mode="json", exclude_none=True),
        "predicted_step_s": plan.prediction.decode.step_s,
        "start_s": start_s,
        "taken_bytes": taken_bytes() if options.device == "cuda" else 0,
        "session_gpu_bytes": session.gpu_bytes,
        "runs": runs,
    }


def set_trace(session: ReplaySession, trace: torch.Tensor, prompt_tokens: int) -> None:
    """Have a session's experts be chosen by another trace, [layers, tokens, choices]."""
    experts = [m for m in session.loaded.module.modules() if "replay_steps" in vars(m)]
    for module, row in zip(experts, trace.unsqueeze(2).long(), strict=True):
        vars(module)["replay_prompt"].copy_(row[:prompt_tokens].transpose(0, 1))
        vars(module)["replay_steps"].copy_(row[prompt_tokens:])
    if session.device.type == "cuda":
        torch.cuda.synchronize()


def draw_traces(options: argparse.Namespace, model: Model) -> dict[str, torch.Tensor]:
    """Draw a trace of each reuse: [layers, tokens, choices]."""
    tokens = options.prompt + options.steps + SPARE_STEPS
    return {r: torch.from_numpy(draw(model, 1, tokens, r)[:, :, 0]).int() for r in REUSES}


def run_alone(options: argparse.Namespace, arguments: Sequence[str], name: str) -> Any:
    """Run one way in a process of its own; returns what it found, or how it ended."""
    into = options.folder / "found.json"
    into.unlink(missing_ok=True)
    profile = options.folder / "benchbw.json"
    missing = options.folder / "no-benchbw.json"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # its one process forms a group, and needs no network for it
        "FREETOKEN_BENCHBW_PATH": str(profile if name in WITH_PROFILE else missing),
    }
    command = [sys.executable, "-m", "benchmarks.peers_freetoken", *arguments]
    command += ["--folder", str(options.folder), "--alone", name]
    log = options.folder / "log.txt"
    began = time.perf_counter()
    with log.open("w") as out:
        try:
            limit = options.limit
            code: Any = subprocess.run(
                command, env=environment, stdout=out, stderr=out, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
    took = time.perf_counter() - began
    if into.exists():
        return {**json.loads(into.read_text("utf-8")), "process_s": took}
    return {"failed": code, "process_s": took, "log": log.read_text("utf-8")[-3000:]}


def run_its_benchmark(options: argparse.Namespace) -> Any:
    """Have FreeToken measure the machine, which its automatic choice goes by."""
    profile = options.folder / "benchbw.json"
    command = [sys.executable, "-m", "freetoken.moe.benchbw", "--dtype", "mxfp4"]
    began = time.perf_counter()
    limit = options.limit
    done = subprocess.run(
        [*command, "-o", str(profile)], capture_output=True, text=True, timeout=limit, check=False
    )
    took = time.perf_counter() - began
    if not profile.exists():
        return {"failed": done.returncode, "log": (done.stdout + done.stderr)[-3000:]}
    found = json.loads(profile.read_text("utf-8"))
    return {key: found.get(key) for key in ("dtypes", "dtype_kernels", "cpu")} | {"took_s": took}


def compare(options: argparse.Namespace, model: Model, arguments: Sequence[str]) -> dict[str, Any]:
    """Run all ways in turn; returns what each found."""
    write_folder(options.config, options.folder)
    making = [sys.executable, "-m", "benchmarks.make_routing", str(options.config)]
    subprocess.run([*making, str(options.folder / "routing.json")], check=True)
    found: dict[str, Any] = {"ways": {}}
    names = options.only or [*OURS, *PEERS]
    if any(name in WITH_PROFILE for name in names):
        found["its_benchmark"] = run_its_benchmark(options)
        print(json.dumps(found["its_benchmark"]), file=sys.stderr, flush=True)
    for name in names:
        chosen = (found.get("its_benchmark", {}).get("dtypes") or {}).get("mxfp4_triton")
        if name == "automatic, its benchmark run" and chosen == "offload":
            each = {"skipped": "its benchmark says offload, its choice without one"}
        else:
            each = run_alone(options, arguments, name)
        found["ways"][name] = each
        print(f"{name}: {json.dumps(each)}", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--machine", help="a machine profile; without one this one is measured")
    parser.add_argument("--gpu-memory", default="8 GiB")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=90, help="seconds that one way may take")
    parser.add_argument("--only", nargs="+", choices=[*OURS, *PEERS])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    model = read_config(options.config, {})
    if options.alone is not None:
        way = run_offplan if options.alone in OURS else run_freetoken
        found = way(options, model, options.alone)
        (options.folder / "found.json").write_text(json.dumps(found), "utf-8")
        sys.stdout.flush()
        os._exit(0)  # FreeToken's threads need not end by themselves
    machine = describe_machine() if options.device == "cuda" else {"torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        found = compare(options, model, arguments)
    asked = {key: getattr(options, key) for key in ("gpu_memory", "prompt", "steps", "rounds")}
    report = {"machine": machine, "config": str(options.config), "asked": asked, **found}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
