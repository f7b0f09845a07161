"""Measures this machine's CPU, which plays GPU where there is none: one memory is host and device.

The CPU itself does what a GPU does beside its host, copies and reads in place included.
"""

from collections.abc import Callable
from functools import partial

import torch

from offplan.hostmem.limits import memory_limit
from offplan.machine.measure_time import figure, time_on_host
from offplan.machine.profile import LAUNCHES, MachineProfile
from offplan.progress import Progress

_LARGE_BYTES = 128 * 2**20
"""Bytes of a copy and of a weight that are past any cache."""
_SMALL_BYTES = 4096
_SIZE = 1024
"""Rows and columns of the matrices that are multiplied."""


def measure_cpu(on_progress: Progress | None = None) -> MachineProfile:
    """Measure the CPU as a device whose link is its own memory, in a second or two.

    Every timed figure is the median of NUM_SAMPLES by the host's clock, after a warm-up. Takes
    twice _LARGE_BYTES.
    """
    steps: tuple[Callable[[], dict[str, object]], ...] = (
        _measure_copies,
        _measure_reads,
        _measure_matmul,
        _measure_operators,
        _find_memory,
    )
    figures: dict[str, object] = {"name": "CPU", "link": "memcpy"}
    for number, step in enumerate(steps, start=1):
        figures |= step()
        if on_progress is not None:
            on_progress(number, len(steps))
    return MachineProfile.model_validate(figures)


def _measure_copies() -> dict[str, object]:
    source, target = (torch.ones(_LARGE_BYTES, dtype=torch.uint8) for _ in range(2))
    large = time_on_host(lambda: target.copy_(source))
    few = slice(_SMALL_BYTES)
    small = time_on_host(lambda: target[few].copy_(source[few]), repeats=100)
    return {
        "h2d": figure(_LARGE_BYTES / large.seconds, "a copy within host memory", large.spread),
        "copy_latency": figure(small.seconds, f"a copy of {_SMALL_BYTES} bytes", small.spread),
    }


def _measure_reads() -> dict[str, object]:
    weight = torch.ones(_LARGE_BYTES // 8192, 4096, dtype=torch.bfloat16)
    vector = torch.ones(4096, 1, dtype=torch.bfloat16)
    timing = time_on_host(lambda: weight @ vector)
    rate = partial(figure, _LARGE_BYTES / timing.seconds, spread=timing.spread)
    return {
        "hbm": rate("a matrix-vector product"),
        "uva": rate("a matrix-vector product, which always reads host memory in place here"),
    }


def _measure_matmul() -> dict[str, object]:
    a, b = (torch.randn(_SIZE, _SIZE).to(torch.bfloat16) for _ in range(2))
    timing = time_on_host(lambda: a @ b)
    return {"matmul": figure(2 * _SIZE**3 / timing.seconds, f"products of {_SIZE}^3")}


def _measure_operators() -> dict[str, object]:
    small = torch.zeros(4096, dtype=torch.bfloat16)
    timing = time_on_host(lambda: small.add_(1), repeats=1000)
    seconds, how = LAUNCHES * timing.seconds, f"{LAUNCHES} small operators"
    return {"layer_overhead": figure(seconds, how, timing.spread, basis="estimated")}


def _find_memory() -> dict[str, object]:
    num_bytes, what = memory_limit()
    return {
        "gpu_memory": figure(num_bytes, f"{what}, for a card's"),
        "host_memory": figure(num_bytes, f"{what}: nothing is locked here"),
        "gpu_overhead": figure(0, "no context beside the process"),
    }
