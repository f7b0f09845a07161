"""Time a plan that keeps experts one by one beside one that does not, as a trace routes tokens.

    python -m benchmarks.replay CONFIG_JSON --machine h200-pcie5 --gpu-memory '12 GiB'
    python -m benchmarks.replay CONFIG_JSON --cached 48
    python -m benchmarks.replay CONFIG_JSON --plans TODAY.yaml KEPT.yaml

Weights are random; what routers choose is taken from a trace, within the captured step as well. The
first form plans for a machine and keeps as many experts of all layers in the same memory; the
second keeps so many and compares with the same rule that keeps none; the third is given both plans.
With ``--later 0 0.5`` more plans follow, in which the host's cores and the link divide the experts
that steps miss, and the link brings so many of a layer for later. All run in turn, in one process,
by traces of each ``--reuse``. Prints JSON: experts hit as a list of the trace says and as the
kernels counted, by layer, the times of steps, the rates that sessions measured, and what the cost
model predicts of each plan for the machine. Ends with an error where these counts differ.
"""

import argparse
import bisect
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.divided import DividedSlots
from benchmarks.make_routing import profile_trace
from benchmarks.run_plan import describe_machine
from benchmarks.traces import REUSES, make_trace
from offplan.backends import Backend
from offplan.capabilities.cached_experts import ExpertSlots, MissRates
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.cached_experts import predict_found
from offplan.costs.predict import predict
from offplan.held.held import hold
from offplan.library.asking import ask
from offplan.library.held_memory import count_held
from offplan.library.machines import load_machine
from offplan.placement import Placement, place
from offplan.plan import Budget, Offload, Plan, Rule, Workload, load_plan
from offplan.planner.make import make_plan
from offplan.routing.use_order import UseOrder
from offplan.runtime.cached_experts.executor import CachedExperts
from offplan.runtime.cached_experts.expert_table import NOTED_TOKENS
from offplan.runtime.cached_experts.rates import scale
from offplan.runtime.forms.experts import are_rounded
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.session import Session
from offplan.transformers_private import list_experts
from offplan.units import parse_bytes


class Replay:
    """Has routed experts be chosen by a trace; stands where a session notes what they choose."""

    def __init__(self, layers: nn.ModuleList, trace: torch.Tensor, prompt_tokens: int) -> None:
        """Take ``trace``, [layers, tokens, batch, choices], layer by layer with routed experts."""
        self._step = torch.zeros(1, dtype=torch.int64, device=trace.device)
        self._layers: list[dict[str, Any]] = []
        rows = iter(trace)
        for layer in layers:
            for experts in list_experts(layer):
                row = next(rows)
                prompt = row[:prompt_tokens].transpose(0, 1).contiguous()
                steps = row[prompt_tokens:].contiguous()
                vars(experts).update(
                    replay_prompt=prompt, replay_steps=steps, replay_step=self._step
                )
                experts.register_forward_pre_hook(_choose)
                self._layers.append(vars(experts))

    def change(self, trace: torch.Tensor) -> None:
        """Have another trace choose, of the same shape; what is captured reads it as well."""
        for own, row in zip(self._layers, trace.to(self._step.device), strict=True):
            num_tokens = own["replay_prompt"].shape[1]
            own["replay_prompt"].copy_(row[:num_tokens].transpose(0, 1))
            own["replay_steps"].copy_(row[num_tokens:])

    def begin(self, batch: int) -> None:
        """Do nothing: what is chosen is there from the start."""

    def note_step(self) -> None:
        """Go on to the next step's choices; queued on the current stream."""
        self._step.add_(1)

    def forget(self) -> None:
        """Begin with the first step again."""
        self._step.zero_()


def _choose(experts: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace what a router chose, [tokens, choices], by what the trace says."""
    hidden, chosen, *others = arguments
    own = vars(experts)
    if chosen.numel() == own["replay_prompt"].numel():
        chosen = own["replay_prompt"].view(chosen.shape)
    elif chosen.numel() == own["replay_steps"][0].numel():
        chosen = own["replay_steps"].index_select(0, own["replay_step"]).view(chosen.shape)
    return hidden, chosen, *others


class ReplaySession(Session):
    """A session whose tokens go where a trace says."""

    def __init__(self, trace: torch.Tensor, prompt_tokens: int, *others: Any, **more: Any) -> None:
        self._trace, self._prompt_tokens = trace, prompt_tokens
        super().__init__(*others, record_routing=True, **more)

    routing: Any

    def _watch_routing(self) -> Any:
        layers = decoder_layers(self.loaded.module)
        trace = self._trace.to(self.device, copy=True)  # which ``change`` writes over
        return Replay(layers, trace, self._prompt_tokens)


def draw(model: Model, batch: int, num_tokens: int, reuse: str) -> np.ndarray[Any, Any]:
    """Draw a trace for each layer and sequence: [layers, tokens, batch, choices]."""
    assert model.experts is not None, "a mixture of experts"
    num_layers = sum(layer.kind == "moe" for layer in model.layers)
    sizes = model.experts.num_experts, model.experts.num_experts_per_token, num_tokens, reuse
    return np.stack(
        [
            np.stack([make_trace(*sizes, seed=1000 * layer + at) for at in range(batch)], axis=1)
            for layer in range(num_layers)
        ]
    )


def count_hits(
    trace: np.ndarray[Any, Any], prompt_tokens: int, num_steps: int, num_experts: int
) -> np.ndarray[Any, Any]:
    """Count what caches of each size would hit, by layer, [layers, experts + 1], and all choices.

    The last tokens of the prompt come first, as if they had been steps; they are not counted.
    """
    found = []
    for row in trace:
        order = UseOrder(1, num_experts)
        for token in row[max(0, prompt_tokens - NOTED_TOKENS) : prompt_tokens]:
            order.take(token.reshape(1, -1))
        before = order.reuse
        for token in row[prompt_tokens : prompt_tokens + num_steps]:
            order.take(token.reshape(1, -1))
        hits = np.cumsum(order.reuse.distances[0] - before.distances[0])
        found.append([0, *hits, int((order.reuse.choices - before.choices)[0])])
    return np.array(found)


def count_divided(
    trace: np.ndarray[Any, Any], prompt_tokens: int, num_steps: int, slots: Sequence[DividedSlots]
) -> None:
    """Have each layer's slots, a list of its own, take the same as ``count_hits`` counts."""
    for row, layer in zip(trace, slots, strict=True):
        tokens = [token.ravel().tolist() for token in row[: prompt_tokens + num_steps]]
        layer.settle(tokens[max(0, prompt_tokens - NOTED_TOKENS) : prompt_tokens])
        for token in tokens[prompt_tokens:]:
            layer.step(token)


def run(session: ReplaySession, prompt: torch.Tensor, num_steps: int) -> dict[str, Any]:
    """Read the prompt and time steps behind it, after all slots were emptied."""
    assert session.routing is not None
    with session.stream(), torch.inference_mode():
        session.loaded.executors["cached_experts"].forget()
        session.routing.forget()
    is_cuda = session.device.type == "cuda"
    with session.stream():
        started = time.perf_counter()
        tokens = session.prefill(prompt).argmax(-1, keepdim=True)
        if is_cuda:
            torch.cuda.synchronize()
        prompt_s = time.perf_counter() - started
        moments: list[Any] = [_mark(is_cuda)]
        for _ in range(num_steps):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
            moments.append(_mark(is_cuda))
        if is_cuda:
            torch.cuda.synchronize()
    pairs = itertools.pairwise(moments)
    steps = [a.elapsed_time(b) / 1e3 if is_cuda else b - a for a, b in pairs]
    cached = session.loaded.executors["cached_experts"]
    assert isinstance(cached, CachedExperts)
    counted = cached.count_layers()
    layers = cached.layers.items()
    rates = {index: each.rates and each.rates._asdict() for index, each in layers}
    server = session.loaded.store.servers.get(Backend.HOST)
    spent = server.count() if isinstance(server, ByCores) else None
    return {
        "rates": rates,
        "codes": [are_rounded(each.experts) for _, each in layers],
        "spent_since_open": spent and spent._asdict(),
        "prompt_s": prompt_s,
        "step_s": statistics.median(steps),
        "step_mean_s": statistics.mean(steps),
        "step_min_s": min(steps),
        "step_max_s": max(steps),
        "hits": {layer: found.hits for layer, found in counted.items()},
        "misses": {layer: found.misses for layer, found in counted.items()},
        "by_cores": {layer: found.by_cores for layer, found in counted.items()},
        "later": {layer: found.later for layer, found in counted.items()},
        "in_place": sum(found.in_place for found in counted.values()),
        "copied_bytes_a_step": sum(found.copied_bytes for found in counted.values()) / num_steps,
    }


def _mark(is_cuda: bool) -> Any:
    if not is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def keep_experts(plan: Plan, model: Model) -> Offload:
    """Keep as many experts of all layers as the plan's budget has room for."""
    assert model.experts is not None
    num_layers = sum(layer.kind == "moe" for layer in model.layers)

    def keep(number: int) -> Offload:
        rule = make_rule(*divmod(number, num_layers))
        return plan.offload.model_copy(update={"rules": (rule,), "prefetch_step": 1})

    def exceeds(number: int) -> bool:
        counted = count_held(plan.model_copy(update={"offload": keep(number)}), model)
        return counted.prediction.gpu_memory.total_bytes > plan.budget.gpu_memory

    numbers = range(num_layers, num_layers * model.experts.num_experts + 1)
    num_fitting = bisect.bisect_left(numbers, True, key=exceeds)
    if not num_fitting:
        raise SystemExit("the budget has no room for one expert of each layer")
    return keep(numbers[num_fitting - 1])


def make_rule(cached: int | None, more: int | None = None) -> Rule:
    """Take the experts of all layers, and keep so many of each."""
    return Rule.model_validate(
        {
            "cpu_offload_params": ["experts"],
            "group_size": 1,
            "num_in_group": 1,
            "prefill": "prefetch",
            "decode": "uva",
            "cached_experts": cached,
            "cached_experts_more": more or None,
        }
    )


def ask_for(options: argparse.Namespace) -> Workload:
    """Return the workload of the runs."""
    return Workload(
        batch=options.batch,
        prompt_tokens=options.prompt,
        output_tokens=options.steps + 1,
        context=options.prompt + options.steps + 9,
    )


def place_offload(model: Model, offload: Offload, options: argparse.Namespace) -> Placement:
    """Place what a plan offloads."""
    return place(hold(model, offload.packing), offload)


def predict_runs(
    options: argparse.Namespace, model: Model, offload: Offload, reuse: str
) -> dict[str, Any]:
    """Predict a step by a profile of such traces: its time, and the experts that it hits."""
    workload, machine = ask_for(options), load_machine(options.machine).profile
    routing = None if reuse == "none" else profile_trace(model, reuse)
    stage = replace(hold(model, offload.packing), routing=routing)
    made = predict([stage], machine, workload, Budget(gpu_memory=machine.gpu_memory.value), offload)
    found = predict_found(place(stage, offload), stage, workload.batch, machine)
    return {"step_s": made.decode.step_s, "hits": None if found is None else found.hits}


def divide(offload: Offload, later: float) -> Offload:
    """Have the host's cores and the link divide the experts that steps of a plan miss.

    The link brings so many of a layer and step for ``later``, of those that the cores multiply.
    """
    changes = {"decode": Backend.HOST, "later_experts": later}
    rules = tuple(
        rule if rule.cached_experts is None else rule.model_copy(update=changes)
        for rule in offload.rules
    )
    return offload.model_copy(update={"rules": rules})


def find_offloads(options: argparse.Namespace, model: Model) -> dict[str, Offload]:
    """Return what the plans offload, by name."""
    found = find_pair(options, model)
    return found | {f"later {later:g}": divide(found["kept"], later) for later in options.later}


def find_pair(options: argparse.Namespace, model: Model) -> dict[str, Offload]:
    """Return what the plan that keeps no experts offloads, and the plan that keeps some."""
    if options.plans:
        plans = zip(("today", "kept"), options.plans, strict=True)
        return {name: load_plan(path).offload for name, path in plans}
    if options.cached:
        kept = make_rule(options.cached, options.more)
        rules = {"today": make_rule(None), "kept": kept}
        chunk = options.prompt
        return {
            k: Offload(prefetch_step=1, prefill_chunk=chunk, rules=(r,)) for k, r in rules.items()
        }
    workload = ask_for(options)
    machine, memory = load_machine(options.machine), parse_bytes(options.gpu_memory)
    question = ask(model, machine, workload, gpu_memory=memory, packing=not options.unpacked)
    plan = make_plan(question).plan
    return {"today": plan.offload, "kept": keep_experts(plan, model)}


def compare(options: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Run the plans in turn by each trace; returns what each took and counted, by the reuse."""
    assert model.experts is not None
    offloads = find_offloads(options, model)
    length = options.prompt + options.steps + 8
    traces = {reuse: draw(model, options.batch, length, reuse) for reuse in options.reuse}
    prompt = torch.arange(options.batch * options.prompt).view(options.batch, -1) % 1000 % 60
    sessions: dict[str, ReplaySession] = {}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        reuse: {name: [] for name in offloads} for reuse in traces
    }

    def open_for(name: str) -> ReplaySession:
        trace = torch.from_numpy(traces[options.reuse[0]])
        session = ReplaySession(
            trace, options.prompt, model, offloads[name], context=length, device=options.device
        )
        session.warm_up(*prompt.shape)
        return session

    # where one session is held at a time, all of its runs come before the other's
    rounds: Iterable[tuple[str, int, str]] = itertools.product(
        traces, range(options.rounds), offloads
    )
    if options.reopen:
        rounds = (
            (reuse, at, n) for n in offloads for reuse in traces for at in range(options.rounds)
        )
    try:
        for reuse, _, name in rounds:
            if name not in sessions:
                if options.reopen:
                    while sessions:
                        sessions.popitem()[1].close()
                sessions[name] = open_for(name)
            with sessions[name].stream():
                sessions[name].routing.change(torch.from_numpy(traces[reuse]))
            runs[reuse][name].append(run(sessions[name], prompt, options.steps))
            print(
                f"{name}, {reuse}: {runs[reuse][name][-1]['step_s'] * 1e3:.3f} ms", file=sys.stderr
            )
    finally:
        for session in sessions.values():
            session.close()
    return {
        "offloads": {k: o.model_dump(mode="json", exclude_none=True) for k, o in offloads.items()},
        "by_reuse": {
            reuse: sum_up(options, model, offloads, traces[reuse], reuse, found)
            for reuse, found in runs.items()
        },
    }


def sum_up(
    options: argparse.Namespace,
    model: Model,
    offloads: dict[str, Offload],
    trace: np.ndarray[Any, Any],
    reuse: str,
    found: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Hold the runs by one trace to its list and to the cost model; prints a line of each plan."""
    assert model.experts is not None
    listed = count_hits(trace, options.prompt, options.steps, model.experts.num_experts)
    predicted = {k: predict_runs(options, model, o, reuse) for k, o in offloads.items()}
    step_s = {k: statistics.median(each["step_mean_s"] for each in r) for k, r in found.items()}
    for name, each in predicted.items():
        took = step_s[name]
        line = f"{name}, {reuse}: predicted {each['step_s'] * 1e3:.2f} ms, took {took * 1e3:.2f}"
        line += f" ({each['step_s'] / took:.2f})"
        if each["hits"] is not None:
            counted = sum(found[name][0]["hits"].values()) / options.steps
            line += f"; predicted {each['hits']:.1f} hits a step, counted {counted:.1f}"
        print(line, file=sys.stderr)
    return {
        "predicted": predicted,
        "listed": {
            name: list_counts(
                name, place_offload(model, offload, options), listed, trace, options, found[name]
            )
            for name, offload in offloads.items()
            if found[name][0]["hits"]
        },
        "choices": int(listed[:, -1].sum()),
        "runs": found,
        "speedup": {name: step_s["today"] / took for name, took in step_s.items()},
    }


def list_counts(
    name: str,
    placement: Placement,
    listed: np.ndarray[Any, Any],
    trace: np.ndarray[Any, Any],
    options: argparse.Namespace,
    found: list[dict[str, Any]],
) -> Any:
    """Return what the trace's list says of a plan; SystemExit where kernels counted otherwise."""
    layers = [slots for _, slots in sorted(placement.caches_of(ExpertSlots).items())]
    if len(layers) != len(listed):
        return "not listed: the plan keeps experts of some layers alone"
    choices = listed[:, -1].tolist()
    hits = [int(row[each.num_kept]) for row, each in zip(listed, layers, strict=True)]
    none = [0] * len(hits)
    expected: dict[str, list[Any]] = {"hits": hits, "by_cores": none, "later": none}
    if any(each.by_cores for each in layers):
        num_chosen, batch = trace.shape[-1], options.batch
        rates = [MissRates(**each) for each in found[0]["rates"].values()]
        slots = [
            DividedSlots(each, scale(of, each.num_experts, num_chosen, batch, codes=codes))
            for each, of, codes in zip(layers, rates, found[0]["codes"], strict=True)
        ]
        count_divided(trace, options.prompt, options.steps, slots)
        expected = {
            "hits": [each.counts["hits"] for each in slots],
            "by_cores": [each.by_cores for each in slots],
            "later": [each.counts["later"] for each in slots],
        }
    pairs = zip(choices, expected["hits"], strict=True)
    expected["misses"] = [chosen - hit for chosen, hit in pairs]
    for number, each in enumerate(found, 1):
        for of, wanted in expected.items():
            if list(each[of].values()) != wanted:
                raise SystemExit(
                    f"{name}, round {number}: counted {of} {each[of]}, the list has {wanted}"
                )
    return {of: sum(wanted) for of, wanted in expected.items()} | {"of": sum(choices)}


def read_config(path: Path, changes: dict[str, Any]) -> Model:
    """Open a model by its config, some of whose keys are changed; null takes one out."""
    if not changes:
        return open_model(str(path))
    config = json.loads(path.read_text("utf-8")) | changes
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "config.json"
        changed.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")
        return open_model(str(changed))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", type=json.loads, default={}, help="keys of the config, as JSON")
    parser.add_argument("--machine", default="h200-pcie5")
    parser.add_argument("--gpu-memory", default="12 GiB")
    parser.add_argument("--cached", type=int)
    parser.add_argument("--more", type=int)
    parser.add_argument("--later", type=float, nargs="+", default=[])
    parser.add_argument("--plans", type=Path, nargs=2)
    parser.add_argument("--reuse", choices=REUSES, nargs="+", default=["published"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--unpacked", action="store_true", help="pack no weights")
    parser.add_argument("--reopen", action="store_true", help="hold one session at a time")
    options = parser.parse_args(arguments)
    model = read_config(options.config, options.set)
    machine: dict[str, Any] = {"cpu": platform.machine(), "torch": torch.__version__}
    if options.device != "cpu":
        machine = describe_machine()
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    asked["plans"] = [str(path) for path in options.plans or ()]
    print(json.dumps({"machine": machine, "asked": asked, **compare(options, model)}, indent=1))


if __name__ == "__main__":
    main()
