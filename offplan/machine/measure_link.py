"""Measures links of the current CUDA device: DMA by size, beside other GPUs and from them, and
kernels that read in place.

Other GPUs keep a CUDA context until the process ends. Which tiles a product is cut into, and so how
often it reads a weight, differs from shape to shape.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import prod

import torch
from torch.nn.functional import linear

from offplan.hostmem.block import view_in_place
from offplan.machine.curve import FIT_FROM_BYTES, CopyRate, fit_latency
from offplan.machine.measure_host import PINNED_BYTES, pinned
from offplan.machine.measure_time import NUM_SAMPLES, Timing, figure, summarise, table, time_work
from offplan.machine.profile import InPlaceRead
from offplan.progress import Progress
from offplan.stores import SECOND_GPU_LINK
from offplan.units import format_bytes

MultiplyExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies rows, [pairs, in], sorted by their experts, by values, [experts, out, in]. The third
one, int32 [experts + 1], has where each expert's rows begin."""


def measure_in_place_reads(
    products: Sequence[tuple[tuple[int, ...], int]],
    pairs_per_token: int,
    uva: float,
    on_progress: Progress | None = None,
    *,
    multiply_experts: MultiplyExperts | None = None,
) -> tuple[InPlaceRead, ...]:
    """Time bf16 products on the current CUDA device, their weight in pinned memory.

    Each product is a shape and a number of tokens; products are sorted by both, in this order. A
    shape is [out, in], or [experts, out, in] for routed experts. Each token goes to
    ``pairs_per_token`` of the experts, every expert has as many, and ``multiply_experts``
    multiplies them. ``uva`` is the rate of reading once, in bytes per second. A weight of more than
    PINNED_BYTES is cut along its first dimension: whole tiles are left out. Noise does not make
    more tokens read less. Raises MemoryLimitError.
    """
    reads: list[InPlaceRead] = []
    with pinned(PINNED_BYTES) as host:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = view_in_place(host, device).view(torch.bfloat16)
        for number, (shape, tokens) in enumerate(products):
            weight = _cut(memory, shape)
            if multiply_experts is None or len(shape) == 2:
                work = _product(weight, tokens)
            else:
                pairs = max(1, tokens * pairs_per_token // shape[0])
                work = partial(multiply_experts, weight, *_deal_out(weight, pairs))
            seconds = time_work(work).seconds
            least = reads[-1].factor if reads and reads[-1].shape == shape else 1.0
            factor = max(least, seconds * uva / weight.nbytes)
            reads.append(InPlaceRead(shape=shape, tokens=tokens, factor=factor))
            if on_progress is not None:
                on_progress(number + 1, len(products))
    return tuple(reads)


def _cut(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """View as much of a weight of this shape as the memory holds."""
    first, *rest = shape
    held = min(first, memory.numel() // prod(rest))
    return memory[: held * prod(rest)].view(held, *rest)


def _product(weight: torch.Tensor, tokens: int) -> Callable[[], torch.Tensor]:
    """Return torch's product; the runtime's own one of few rows takes as long over the link."""
    hidden = torch.zeros(tokens, weight.shape[-1], dtype=weight.dtype, device="cuda")
    return lambda: linear(hidden, weight)


def _deal_out(weight: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of as many pairs of each expert, and where each expert's begin."""
    num_experts, _, size = weight.shape
    rows = torch.zeros(pairs * num_experts, size, dtype=weight.dtype, device="cuda")
    return rows, torch.arange(num_experts + 1, dtype=torch.int32, device="cuda") * pairs


CURVE_BYTES = (*(4096 * 4**power for power in range(8)), PINNED_BYTES)
"""Sizes of copies, 4 KiB to 256 MiB; the rate is flat from 64 MiB on."""
REREAD_ROWS = (1, 128, 256, 512, 1024, 4096)
"""Rows of the inputs of the products whose reads are counted."""
BESIDE_BYTES = 32 * 2**20
"""Bytes of each weight that is read in place while copies are queued."""
REREAD_BYTES = 128 * 2**20
"""Bytes of the weight that products read in place: more than any GPU's cache holds."""
_COLUMNS = 4096


def copy_curve(copy: Callable[[int], object], *, queued: bool = True) -> list[CopyRate]:
    """Time copies of each of ``CURVE_BYTES``, alone on the link.

    ``copy`` queues a copy of so many bytes on the current stream.
    """
    curve = []
    for size in CURVE_BYTES:
        timing = time_work(partial(copy, size), max(1, min(50, 2**26 // size)), queued=queued)
        curve.append(CopyRate(bytes=size, rate=size / timing.seconds, spread=timing.spread))
    return curve


def describe_dma(curve: list[CopyRate], rate: str, latency: str) -> dict[str, object]:
    """Reduce a curve to the two figures that price a copy, under the profile's keys for them."""
    largest = curve[-1]
    fit = fit_latency(curve, largest.rate)
    return {
        rate: figure(largest.rate, f"DMA of {format_bytes(largest.bytes)}", largest.spread),
        latency: figure(
            fit.latency_s,
            f"fitted to copies from {format_bytes(FIT_FROM_BYTES)} on, which it misses by at most "
            f"{fit.largest_error:.1%}",
        ),
    }


def measure_pinned() -> dict[str, object]:
    """Measure DMA between pinned memory and the device, both ways."""
    with pinned(PINNED_BYTES) as host:
        device = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
        down = copy_curve(lambda size: device[:size].copy_(host[:size], non_blocking=True))
        up = copy_curve(lambda size: host[:size].copy_(device[:size], non_blocking=True))
    return {
        **describe_dma(down, "h2d", "copy_latency"),
        "h2d_curve": table(down, "pinned DMA, queued back to back"),
        "d2h_curve": table(up, "pinned DMA, queued back to back"),
    }


def measure_pageable() -> dict[str, object]:
    """Measure copies from ordinary memory to the device."""
    host = torch.ones(PINNED_BYTES, dtype=torch.uint8)  # written: pages that exist
    device = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    # the host takes part in these copies: behind a held stream it would wait, not launch
    curve = copy_curve(lambda size: device[:size].copy_(host[:size]), queued=False)
    return {"h2d_pageable_curve": table(curve, "copies from memory that is not pinned")}


def measure_in_place() -> dict[str, object]:
    """Measure kernels that read pinned memory in place: their rate, and how often they read."""
    with pinned(PINNED_BYTES) as host:
        device = torch.device("cuda", torch.cuda.current_device())
        weight = view_in_place(host, device).view(torch.bfloat16).view(-1, _COLUMNS)
        vector = torch.zeros(_COLUMNS, 1, dtype=torch.bfloat16, device="cuda")
        once = time_work(lambda: weight @ vector)
        rate = PINNED_BYTES / once.seconds
        beside = _time_beside_copies(host, weight, vector)
    shape = (REREAD_BYTES // (2 * _COLUMNS), _COLUMNS)
    reads = measure_in_place_reads([(shape, rows) for rows in REREAD_ROWS], 0, rate)
    factors = [{"rows": read.tokens, "factor": read.factor} for read in reads]
    how = f"reading {format_bytes(PINNED_BYTES)} of pinned memory in place"
    again = f"with {format_bytes(REREAD_BYTES)} read in place"
    return {
        "uva": figure(rate, f"matrix-vector product {how}", once.spread),
        "uva_beside_copies": figure(
            # noise must not make the link faster for being shared
            min(rate, PINNED_BYTES / beside.seconds),
            f"matrix-vector products of {format_bytes(BESIDE_BYTES)} each, while copies are queued",
            beside.spread,
        ),
        "uva_rereads": table(factors, f"bf16 products {again}, beside uva"),
    }


def _time_beside_copies(host: torch.Tensor, weight: torch.Tensor, vector: torch.Tensor) -> Timing:
    """Time products with all parts of ``weight``, one after another, while ``host`` is copied."""
    device, copies = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
    parts = weight.split(BESIDE_BYTES // (2 * _COLUMNS))

    def work() -> None:
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            device.copy_(host, non_blocking=True)
        for part in parts:
            part @ vector

    timing = time_work(work)
    copies.synchronize()  # before `device` goes
    return timing


_SHARE_BYTES = 64 * 2**20
"""Bytes of each GPU's own pinned block; from this size on the rate is flat."""
_REPEATS = 16
"""Copies of that block in a sample, so that their beginnings and ends weigh little."""


def measure_concurrent() -> dict[str, object]:
    """Measure host to device while 2, 4, ... and all GPUs copy, the first ones of the host.

    Engines give processes these. A number of them of which one is taken is left out.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rates: list[dict[str, object]] = []
    for number in count_together(len(devices)):
        try:
            samples = _copy_together(devices[:number])
        except RuntimeError:  # out of memory, or in use by a process that shares it with none
            break
        for device, column in zip(devices, zip(*samples, strict=True), strict=False):
            timing = summarise(column)
            rate = {"rate": _SHARE_BYTES / timing.seconds, "spread": timing.spread}
            rates.append({"device": device.index, **rate, "num_gpus": number})
    how = "pinned DMA of so many GPUs at once, each from a block of its own"
    return {"h2d_concurrent": table(rates, how)} if rates else {}


def count_together(num_gpus: int) -> list[int]:
    """List the numbers of GPUs that copy at once: 2, 4, ... and all."""
    powers = (2**power for power in range(1, num_gpus.bit_length()))
    return sorted({*powers, num_gpus} - {0, 1})


def _copy_together(devices: list[torch.device]) -> list[list[float]]:
    """Return the seconds of one copy, a row a sample, a column a device; waits for all of them."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(pinned(_SHARE_BYTES)) for _ in devices]
        targets = [torch.empty(_SHARE_BYTES, dtype=torch.uint8, device=each) for each in devices]
        streams = [torch.cuda.Stream(each) for each in devices]
        samples = []
        for _ in range(NUM_SAMPLES + 1):  # the first one warms up
            marks = []
            for host, target, stream in zip(hosts, targets, streams, strict=True):
                with torch.cuda.stream(stream):  # makes the stream's device current, too
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for _ in range(_REPEATS):
                        target.copy_(host, non_blocking=True)
                    stop.record()
                marks.append((start, stop))
            for _, stop in marks:
                stop.synchronize()
            samples.append([start.elapsed_time(stop) / 1e3 / _REPEATS for start, stop in marks])
        return samples[1:]


def measure_peer() -> dict[str, object]:
    """Measure DMA from the nearest other GPU's memory; nothing if none can be reached."""
    this = torch.cuda.current_device()
    curves: list[list[CopyRate]] = []
    for other in range(torch.cuda.device_count()):
        # torch copies from the source's side: it is the peer that needs access
        if other != this and torch.cuda.can_device_access_peer(other, this):
            with suppress(RuntimeError):  # as above: a GPU that cannot be used is no store
                curves.append(_copy_from(torch.device("cuda", other)))
    if not curves:
        return {}
    fastest = max(curves, key=lambda curve: curve[-1].rate)
    return {
        **describe_dma(fastest, SECOND_GPU_LINK.rate, SECOND_GPU_LINK.latency),
        "peer_curve": table(fastest, "DMA from another GPU, queued back to back"),
    }


def _copy_from(other: torch.device) -> list[CopyRate]:
    store = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=other)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    return copy_curve(lambda size: target[:size].copy_(store[:size], non_blocking=True))
