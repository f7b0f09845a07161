"""Measures the link of the current CUDA device: DMA by size, and kernels that read in place."""

from collections.abc import Callable
from functools import partial

import torch

from offplan.hostmem.block import view_in_place
from offplan.machine.curve import FIT_FROM_BYTES, CopyRate, fit_latency
from offplan.machine.measure_host import PINNED_BYTES, pinned
from offplan.machine.measure_products import measure_in_place_reads
from offplan.machine.measure_time import Timing, figure, table, time_work
from offplan.units import format_bytes

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
