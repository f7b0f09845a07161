"""Links for measuring: one that times what compute waits for, one that overlaps nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offplan.runtime.device import settle
from offplan.runtime.passes.link import Link
from offplan.schedule import Copy, Wait

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


@dataclass(frozen=True)
class Waiting:
    """Compute standing still for a layer's bytes."""

    layer: int
    start_s: float
    """Seconds from the beginning of the recording."""
    stop_s: float


@dataclass(frozen=True)
class Recording:
    """All waits of some passes, in their order."""

    seconds: float
    """Seconds from the beginning of the recording to its end."""
    waits: tuple[Waiting, ...]

    @property
    def stalls_s(self) -> dict[int, float]:
        """Seconds that compute waited, by layer."""
        stalls: dict[int, float] = {}
        for wait in self.waits:
            stalls[wait.layer] = stalls.get(wait.layer, 0.0) + wait.stop_s - wait.start_s
        return stalls


class TimedLink:
    """A link that, while asked to, records how long compute waited for each layer's bytes.

    Streams: events on the current (compute) stream before and after each wait; between them
    nothing but the wait is queued. On the CPU a copy is timed too: compute stands still for it.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        """Pass everything on to ``link``; nothing is recorded before ``start``."""
        self._link = link
        self._device = device
        self._waits: list[tuple[int, Moment, Moment]] | None = None
        """Layer, beginning and end of each wait; None while nothing is recorded."""
        self._began: Moment = 0.0

    @property
    def bytes_moved(self) -> int:
        """Bytes copied so far."""
        return self._link.bytes_moved

    def copy(self, op: Copy) -> None:
        """Queue a copy."""
        self._ask(self._link.copy, op, timed=self._device.type != "cuda")

    def wait(self, op: Wait) -> None:
        """Wait for a slot, and note for how long if recording."""
        self._ask(self._link.wait, op)

    def _ask(self, ask: Callable[[Any], None], op: Copy | Wait, *, timed: bool = True) -> None:
        if self._waits is None or not timed:
            ask(op)
            return
        before = mark(self._device)
        ask(op)
        self._waits.append((op.span.layer, before, mark(self._device)))

    def start(self) -> None:
        """Record from now on; what the current stream does so far is left out."""
        self._waits, self._began = [], mark(self._device)

    def stop(self) -> Recording:
        """Stop recording, and return what was recorded. Synchronises the device."""
        waits, self._waits = self._waits or [], None
        ended = mark(self._device)
        settle(self._device)
        noted = []
        for layer, before, after in waits:
            start_s = seconds_between(self._began, before)
            # a wait of microseconds would drown in the rounding of moments far from the beginning
            noted.append(Waiting(layer, start_s, start_s + seconds_between(before, after)))
        return Recording(seconds_between(self._began, ended), tuple(noted))


class SerialLink(TimedLink):
    """A timed link that compute joins after every copy: what offloading costs without overlap."""

    def copy(self, op: Copy) -> None:
        """Queue a copy and make compute issued from now on wait for it."""
        super().copy(op)
        self.wait(Wait(op.slot, op.span))
