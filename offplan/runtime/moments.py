"""A device that works: made the current one, moments in its work, the time between them."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch

Moment = torch.cuda.Event | float
"""A CUDA event in a stream, or the host's clock in seconds where the host does the work."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a CUDA device is the current one; nothing changes for the CPU.

    What names no device, as page locks do, would else make a context on the first GPU.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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


def settle(device: torch.device) -> None:
    """Let the device finish all that was queued, on every stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
