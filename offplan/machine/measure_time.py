"""Times work on the current CUDA device or the CPU; says a figure with samples and spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

NUM_SAMPLES = 7
_CYCLES_A_LAUNCH = 80_000
"""Clock cycles of about 40 us: the host launches anything that is timed here in less."""


class Timing(NamedTuple):
    """The time that some work takes."""

    seconds: float
    """Median or mean of the samples, in seconds."""
    spread: float
    """Relative spread of the samples: (largest - smallest) / seconds."""
    samples: int = NUM_SAMPLES


def summarise(samples: Sequence[float]) -> Timing:
    """Reduce samples, in seconds, to their median and spread."""
    median = statistics.median(samples)
    return Timing(median, round((max(samples) - min(samples)) / median, 4), len(samples))


def average(samples: Sequence[float]) -> Timing:
    """Reduce samples, in seconds, to their mean and spread."""
    mean = statistics.fmean(samples)
    spread = (max(samples) - min(samples)) / mean if mean else 0.0
    return Timing(mean, round(spread, 4), len(samples))


def time_work(work: Callable[[], object], repeats: int = 1, *, queued: bool = False) -> Timing:
    """Time one call by events on the current stream, after a call that warms up.

    ``queued`` holds the stream until all calls are launched. Work that is shorter than its launch
    is so timed as in a queue that never runs dry. Waits for the stream after each sample.
    """
    work()
    samples = []
    for _ in range(NUM_SAMPLES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued:
            torch.cuda._sleep(_CYCLES_A_LAUNCH * (repeats + 1))
        start.record()
        for _ in range(repeats):
            work()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3 / repeats)
    return summarise(samples)


def time_once(work: Callable[[], object], repeats: int = 1) -> float:
    """Time one call that is done when it returns, in seconds by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def time_on_host(work: Callable[[], object], repeats: int = 1) -> Timing:
    """Time one call that is done when it returns, after a call that warms up."""
    work()
    return summarise([time_once(work, repeats) for _ in range(NUM_SAMPLES)])


def figure(
    value: object,
    how: str,
    spread: float | None = None,
    basis: str = "measured",
    samples: int = NUM_SAMPLES,
) -> dict[str, object]:
    """Say a figure of the profile; ``spread`` is that of ``samples``, if it was timed."""
    return {
        "value": value,
        "basis": basis,
        "source": f"{how}, torch {torch.__version__}",
        "samples": None if spread is None else samples,
        "spread": spread,
    }


def table(entries: Sequence[object], how: str) -> dict[str, object]:
    """Say a table of the profile, each of whose entries was timed NUM_SAMPLES times."""
    return {**figure(entries, how), "samples": NUM_SAMPLES}
