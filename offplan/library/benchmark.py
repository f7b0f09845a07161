"""``bench_plan``: what a plan takes on this machine, beside other ways to run its workload."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import find_weights
from offplan.errors import InputError, OffplanError
from offplan.files import StrPath
from offplan.hostmem.limits import peak_host_bytes
from offplan.library import llama_bench as llama
from offplan.library.planned import open_planned_model
from offplan.library.repricing import ComparedCounts, compare_counts, price_again
from offplan.library.runnable import check_before_fetching
from offplan.library.settled import load_settled, settle_sampled
from offplan.library.settling import Tell, keep_priced, replan_without
from offplan.plan import Plan, take_plan
from offplan.progress import Stages, silent
from offplan.routing.profile import require_routing
from offplan.runtime.device import device_name, find_device
from offplan.runtime.measuring.accelerated import require_accelerate
from offplan.runtime.measuring.versus import WAYS, Bench, Measurement, measure_plan
from offplan.runtime.memory.gpu_memory import bytes_in_use
from offplan.runtime.prompts import random_prompt
from offplan.runtime.session import NUM_WARMUP_STEPS, Session

DEFAULT_STEPS = 20
"""Decode steps that are timed in each request, where the context has room for them."""


@dataclass(frozen=True)
class BenchResult:
    """The measurements of one benchmark of a plan."""

    device: str
    """Name of the device it ran on: ``NVIDIA H200``, ``CPU``."""
    batch: int
    """Sequences of each request."""
    prompt_tokens: int
    """Tokens of each prompt."""
    num_steps: int
    """Decode steps that were timed in each request."""
    num_repeats: int
    """Requests that were timed."""
    plan: Measurement
    """Time and memory that the plan took."""
    host_bytes: int
    """Host memory of the process at its peak, libraries included, with the plan loaded."""
    counts: Mapping[str, ComparedCounts]
    """Counts of steps by the capabilities that have some: experts found cached, and missed."""
    ran: Plan
    """The plan that was measured: another one where weights turned out not to pack."""
    others: Mapping[str, Measurement | str]
    """Other ways by name; a text says why one could not be measured."""


def bench_plan(
    plan: Plan | StrPath,
    *,
    others: Sequence[str] = (),
    model: Model | StrPath | None = None,
    num_steps: int | None = None,
    num_repeats: int = 5,
    device: str | torch.device | None = None,
    dummy_weights: bool = False,
    on_stage: Stages = silent,
    tell: Tell | None = None,
    record: Callable[[Session], None] | None = None,
    gguf: StrPath | None = None,
    llama_bench: StrPath | None = None,
) -> BenchResult:
    """Measure a plan's workload on random tokens: time, bytes moved, stalls and memory.

    ``plan`` is the plan or its file. ``others`` are further ways to run it, of WAYS: ``resident``,
    ``serial``, ``accelerate``, and ``llama.cpp``, which runs the file ``gguf`` by the program
    ``llama_bench`` (that of PATH if left out) in the plan's GPU memory. One that fails does not
    take the others with it. In each of
    ``num_repeats`` requests ``num_steps`` decode steps are timed (DEFAULT_STEPS where they fit, if
    left out). ``model``, ``device``, ``dummy_weights`` and ``on_stage`` are as in ``open_session``.
    ``tell`` hears of weights that do not pack; without it no plan is made again around them.
    ``record`` is given the plan's session once it was measured, with the routing of its steps.

    Raises what ``open_session`` raises. Raises InputError for an unknown way, a model whose
    vocabulary is not known, and more steps than the context has room for.
    """
    plan = take_plan(plan)
    plan.require_one_gpu()
    found = open_planned_model(plan, model, on_stage("reading headers"))
    plan = price_again(plan, found)
    if record is not None:
        require_routing(found, way=plan.goal.way)
    workload = plan.workload
    room = workload.context - workload.prompt_tokens - NUM_WARMUP_STEPS
    num_steps = num_steps or max(1, min(DEFAULT_STEPS, room))
    if room < num_steps:
        raise InputError(
            f"{workload.prompt_tokens} prompt tokens, {NUM_WARMUP_STEPS} steps of warm-up and "
            f"{num_steps} timed ones exceed the plan's context of {workload.context}: lower "
            "`num_steps`, or plan with a larger `context`"
        )
    others = [*others, *([llama.NAME] if gguf is not None and llama.NAME not in others else [])]
    _check_ways(others)
    ways = dict(WAYS)
    if llama.NAME in others:
        ways[llama.NAME] = llama.find_llama_bench(plan, found, gguf, llama_bench).measure
    chosen = find_device(device)
    if not dummy_weights:
        check_before_fetching(found, plan.offload, workload.context, chosen, plan.goal.way)
        if tell is not None:
            plan = settle_sampled(plan, found, replan_without(tell))
    setup = Bench(
        model=found,
        offload=plan.offload,
        context=workload.context,
        device=chosen,
        folder=None if dummy_weights else find_weights(found, on_stage("fetching weights, MiB")),
        prompt=random_prompt(found, workload),
        num_steps=num_steps,
        num_repeats=num_repeats,
        used_before=bytes_in_use(chosen),
        way=plan.goal.way,
        host_threads=plan.goal.host_threads,
        record=record,
    )
    # first, so that the peaks that only grow are the plan's own
    plan, measured = load_settled(
        plan,
        found,
        chosen,
        lambda plan: measure_plan(replace(setup, offload=plan.offload), on_stage),
        keep_priced if tell is None else replan_without(tell),
    )
    host_bytes, setup = peak_host_bytes(), replace(setup, offload=plan.offload)
    return BenchResult(
        device=device_name(chosen),
        batch=workload.batch,
        prompt_tokens=workload.prompt_tokens,
        num_steps=num_steps,
        num_repeats=num_repeats,
        plan=measured,
        host_bytes=host_bytes,
        counts=compare_counts(plan, found, measured.counts),
        ran=plan,
        others={name: _measure_way(name, ways[name], setup, on_stage) for name in others},
    )


def _check_ways(names: Sequence[str]) -> None:
    """Check what the plan is to be compared with, before anything is loaded."""
    known = (*WAYS, llama.NAME)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"{unknown[0]!r} is not a way to run a plan: name {', '.join(known)}")
    if "accelerate" in names:
        require_accelerate()


def _measure_way(
    name: str, measure: Callable[[Bench, Stages], Measurement], setup: Bench, on_stage: Stages
) -> Measurement | str:
    """Run the workload in another way, or say why it could not be."""
    try:
        return measure(setup, lambda stage: on_stage(f"{stage}, {name}"))
    except OffplanError as error:
        return " ".join(str(error).split())
