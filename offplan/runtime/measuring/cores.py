"""Measures what the host's cores read of a model's weights that they multiply, and the hand-over.

A sample is a sequence of products, layer after layer, each of other weights than the one before.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from offplan.backends import Backend
from offplan.checkpoint.model import Model
from offplan.errors import OffplanError
from offplan.forms.form import RAW, Component
from offplan.held.stage import Stage
from offplan.hostcores.coordinator import choose_cores
from offplan.hostcores.library import Activation, Dense, Team
from offplan.hostmem.block import HostBlock
from offplan.hostmem.busy import Watch, spread_of_half
from offplan.hostmem.limits import core_quota, least_room
from offplan.machine.measure_time import Timing, figure, summarise, time_once, time_work
from offplan.plan import Offload, Rule
from offplan.runtime.forms.reference import Components
from offplan.runtime.host_cores import cores
from offplan.runtime.host_cores.executor import ByCoresModule, ExpertsTask, task_of
from offplan.runtime.host_cores.handover import Handover, nearest_cores
from offplan.runtime.session import Session
from offplan.units import format_bytes

LEAST_BYTES = 2 << 30
"""Bytes of weights that are multiplied in turns, where the model has so many: more than caches."""
MOST_BYTES = 5 << 30
"""Bytes of a model's weights that ``analyze`` has made to be multiplied, at most."""
NUM_PRODUCTS = 32
"""Products of a sample."""
NUM_RATE_SAMPLES = 21
"""Samples of all products: other guests of a host take memory for tenths of a second.

Source: seven samples on one H100's host had a spread of 0.15, and a median of 0.73 of what steps
then read beside copies.
"""
DEFAULT_SHAPE = 2048, 768, 8
"""Hidden and inner columns of bf16 experts, and how many a token has, where there is no model."""
_COPY_BYTES = 64 << 20
_ROUND_TRIPS = 50


class Product(NamedTuple):
    """A product of one row, of weights that products before it have not read."""

    compute: Callable[[Team], None]
    num_bytes: int
    """Bytes of weights that it reads."""
    keeps: Any
    """Objects that its addresses point to."""


def is_small(stage: Stage) -> bool:
    """Return True if ``measure_cores`` page-locks few bytes: MOST_BYTES, a quarter of the room."""
    room, (_, num_bytes) = least_room(), _count_sample(stage.model)
    return num_bytes <= MOST_BYTES and (room is None or num_bytes <= room[0] // 4)


def measure_cores(
    stage: Stage | None, device: torch.device, num_threads: int | None = None
) -> dict[str, dict[str, object]]:
    """Measure the cores' figures of a profile on this host, at a model's own sizes and forms.

    Without a model (``stage``) bf16 experts of DEFAULT_SHAPE are multiplied. Beside copies, and for
    the round trip, a CUDA ``device`` is needed: elsewhere these figures are left out. Raises
    OffplanError where the cores cannot multiply what the model has, or there are fewer cores than
    ``num_threads``. Figures that other processes disturb are estimates, whose source says so.
    """
    cores.load()  # which refuses systems whose cores nobody can watch
    with Watch() as watch:
        found = _measure(stage, device, num_threads, watch)
    if watch.why is not None:
        for name in found.keys() - {"host_threads"}:
            source = f"{watch.why}: {found[name]['source']}"
            found[name] |= {"basis": "estimated", "source": source}
    return found


def _measure(
    stage: Stage | None, device: torch.device, num_threads: int | None, watch: Watch
) -> dict[str, dict[str, object]]:
    library, on_gpu = cores.load(), device.type == "cuda"
    nearest = nearest_cores(device) if on_gpu else ()
    allowed, quota = os.sched_getaffinity(0), core_quota()
    chosen = choose_cores(allowed, nearest=nearest, num_threads=num_threads, quota=quota)
    team, kernels = library.team(len(chosen), chosen), library.kernels()
    try:
        with _lend_products(stage, device, kernels) as (products, what):
            # the caller is one of the team; pinned before, it would have torch's threads, which
            # make the weights, share its core
            os.sched_setaffinity(0, chosen[:1])
            num_bytes = sum(each.num_bytes for each in products)
            work = partial(_compute_all, team, products)
            how = f"{what}, threads: {len(chosen)}"
            alone = _time(work, watch)
            found = {
                "cores": _say_rate(num_bytes / alone.seconds, how, alone),
                "host_threads": figure(len(chosen), "threads that the cores were measured with"),
            }
            if on_gpu:
                found |= _measure_beside(work, num_bytes, how, alone.seconds, watch)
            os.sched_setaffinity(0, allowed)
    finally:
        os.sched_setaffinity(0, allowed)
        team.close()
    if on_gpu:  # by threads of its own, which are pinned to cores that the caller may use
        found |= _measure_round_trip(device)
    return found


def _time(work: Callable[[], None], watch: Watch) -> Timing:
    """Time all products on the host, after they were computed once."""
    work()
    samples = [time_once(work) for _ in range(NUM_RATE_SAMPLES)]
    watch.note(spread_of_half(samples))
    return summarise(samples)


def _compute_all(team: Team, products: list[Product]) -> None:
    for each in products:
        each.compute(team)


def _measure_beside(
    work: Callable[[], None], num_bytes: int, how: str, seconds: float, watch: Watch
) -> dict[str, dict[str, object]]:
    """Time products while the device copies from host memory, and what both get of it."""
    block = HostBlock(_COPY_BYTES, pin=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    # the link is busy from before the first product to behind the last: 60 GB/s at most
    num_copies = max(8, round(4 * (NUM_RATE_SAMPLES + 2) * seconds * 60e9 / _COPY_BYTES))
    ends = []
    with torch.cuda.stream(stream):
        for _ in range(num_copies):
            target.copy_(block.tensor, non_blocking=True)
            ends.append(torch.cuda.Event())
            ends[-1].record()
    began, before = time.perf_counter(), sum(each.query() for each in ends)
    beside = _time(work, watch)
    passed, after = time.perf_counter() - began, sum(each.query() for each in ends)
    torch.cuda.synchronize()
    block.close()
    if after == num_copies:  # the copies ended first: cores so slow have no rate beside them
        return {}
    copies, rate = (after - before) * _COPY_BYTES / passed, num_bytes / beside.seconds
    how = f"{how}, while copies to the device got {copies / 1e9:.1f} GB/s"
    return {
        "cores_beside_copies": _say_rate(rate, how, beside),
        "host_reads": _say_rate(rate + copies, f"{how}: both together", beside),
    }


def _say_rate(rate: float, how: str, timing: Timing) -> dict[str, object]:
    return figure(rate, how, timing.spread, samples=timing.samples)


def _measure_round_trip(device: torch.device) -> dict[str, dict[str, object]]:
    """Time captured exchanges of products that are too small to take time themselves.

    One thread computes them: the rate of products has what a team takes to gather.
    """
    weight = (torch.randn(16, 128) * 0.02).to(torch.bfloat16)
    matrix = cores.describe(RAW, {Component.WEIGHT: weight})
    x = torch.randn(1, 128, device=device).to(torch.bfloat16)
    handover = Handover(device, num_threads=1)
    try:
        handover.multiply(matrix, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            for _ in range(_ROUND_TRIPS):
                handover.multiply(matrix, x)
        with handover.caller_elsewhere():
            timing = time_work(graph.replay)
        handover.check()
        del graph
    finally:
        handover.close()
    how = f"{_ROUND_TRIPS} captured products of 16 rows by one thread, one after the other"
    return {"cores_round_trip": figure(timing.seconds / _ROUND_TRIPS, how, timing.spread)}


def _count_sample(model: Model) -> tuple[int, int]:
    """Return how many of a model's layers a sample is of, and their bytes."""
    count, taken = 0, 0
    while count < len(model.layers) and taken < LEAST_BYTES:
        taken += sum(parameter.nbytes for parameter in model.layers[count].parameters)
        count += 1
    return count, taken


@contextmanager
def _lend_products(
    stage: Stage | None, device: torch.device, kernels: int
) -> Iterator[tuple[list[Product], str]]:
    """Lend the products of a sample, and say what they are of."""
    if stage is None:
        yield from _lend_default(device, kernels)
        return
    model = stage.model
    count, _ = _count_sample(model)
    rule = Rule(group_size=1, num_in_group=1, prefill=Backend.UVA, decode=Backend.HOST)
    offload = Offload(prefill_chunk=64, rules=(rule,)).recoded_by(stage.recoding)
    short = replace(model, layers=model.layers[:count])
    with Session(short, offload, context=64, device=device, capture=False) as session:
        modules = session.loaded.module.modules()
        tasks = [task_of(each) for each in modules if isinstance(each, ByCoresModule)]
        routed = [task for task in tasks if isinstance(task, ExpertsTask)]
        num_chosen = 0 if stage.experts is None else stage.experts.num_experts_per_token
        products: list[Product] = []
        for turn in range(NUM_PRODUCTS if routed else 1):
            if routed:
                task, first = routed[turn % len(routed)], turn // len(routed) * num_chosen
                parts = [parts for _, parts in task.keeps[0]]
                products.append(_send(task.experts, parts, num_chosen, first, kernels))
                continue
            products += [
                _multiply(task.weight, task.keeps, kernels)
                for task in tasks
                if not isinstance(task, ExpertsTask)
            ]
        if not products:
            raise OffplanError(f"{model.source} has no matrices that the host's cores can multiply")
        each_bytes = format_bytes(sum(each.num_bytes for each in products) // len(products))
        yield products, f"products of {model.model_type} as stored, {each_bytes} each"


def _lend_default(device: torch.device, kernels: int) -> Iterator[tuple[list[Product], str]]:
    hidden, inner, num_chosen = DEFAULT_SHAPE
    one = 3 * hidden * inner * 2
    num_experts = max(num_chosen, LEAST_BYTES // one)
    block = HostBlock(num_experts * one, pin=device.type == "cuda")
    values = block.tensor.view(torch.bfloat16).view(num_experts, -1)
    values.copy_((torch.randn(1, one // 2) * 0.02).to(torch.bfloat16))
    split = num_experts * 2 * inner * hidden
    flat = values.view(-1)
    up = {Component.WEIGHT: flat[:split].view(num_experts, 2 * inner, hidden)}
    down = {Component.WEIGHT: flat[split:].view(num_experts, hidden, inner)}
    experts = cores.Experts(up=cores.describe(RAW, up), down=cores.describe(RAW, down))
    experts.num_experts, experts.is_gated = num_experts, 1
    experts.activation, experts.alpha, experts.limit = Activation.SILU, 1.0, float("inf")
    products = [
        _send(experts, [up, down], num_chosen, turn * num_chosen, kernels)
        for turn in range(NUM_PRODUCTS)
    ]
    try:
        yield products, f"{num_chosen} bf16 experts of {format_bytes(one)}"
    finally:
        del values, flat, up, down
        block.close()


def _send(
    experts: cores.Experts, parts: list[Components], num_chosen: int, first: int, kernels: int
) -> Product:
    """Send one token through experts from ``first`` on, which products before it have not read."""
    num = experts.num_experts
    # far from one another, as experts that are chosen are
    chosen = (torch.arange(first, first + num_chosen) * _step(num)) % num
    x = torch.randn(1, experts.up.num_in).to(torch.bfloat16)
    out = torch.empty(1, experts.down.num_out, dtype=torch.bfloat16)
    factors = torch.full((1, num_chosen), 1 / num_chosen)
    task = cores.Experts.from_buffer_copy(experts)
    task.kernels, task.precise, task.num_tokens, task.num_chosen = kernels, 0, 1, num_chosen
    task.inputs, task.chosen = x.data_ptr(), chosen.data_ptr()
    task.factors, task.outputs = factors.data_ptr(), out.data_ptr()
    whole = sum(map(_count_bytes, parts))
    keeps = task, x, out, chosen, factors, parts
    return Product(lambda team: team.multiply_experts(task), whole * num_chosen // num, keeps)


def _multiply(weight: cores.Matrix, parts: Components, kernels: int) -> Product:
    x = torch.randn(1, weight.num_in).to(torch.bfloat16)
    out = torch.empty(1, weight.num_out, dtype=torch.bfloat16)
    task = Dense(kernels, weight, 1, x.data_ptr(), out.data_ptr(), 0)
    keeps = task, x, out, parts
    return Product(lambda team: team.multiply(task), _count_bytes(parts), keeps)


def _count_bytes(parts: Components) -> int:
    return sum(value.nbytes for part, value in parts.items() if part is not Component.PATCHES)


def _step(num: int) -> int:
    """Return a number that has no divisor in common with ``num``, a third of it or so."""
    return next(step for step in range(num // 3 + 1, 2 * num + 2) if math.gcd(step, num) == 1)
