"""Moments in a device's work, and the time between them."""

import time

import torch

Moment = torch.cuda.Event | float
"""A CUDA event in a stream, or the host's clock in seconds where the host does the work."""


def mark(device: torch.device) -> Moment:
    """Mark when the device gets here: an event on the current stream; synchronises nothing."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, second: Moment) -> float:
    """Seconds from one moment to a later one; the device must have passed both."""
    if isinstance(first, float) or isinstance(second, float):
        return float(second) - float(first)  # type: ignore[arg-type]  # moments of one clock
    return float(first.elapsed_time(second)) / 1e3
