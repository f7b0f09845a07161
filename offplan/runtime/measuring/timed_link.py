"""Links for measuring: one that times what compute waits for, one that overlaps nothing."""

import torch

from offplan.runtime.device import settle
from offplan.runtime.measuring.moments import Moment, mark, seconds_between
from offplan.runtime.passes.link import Link
from offplan.schedule import Copy, Wait


class TimedLink:
    """A link that, while asked to, records how long compute waited for each layer's bytes.

    Streams: events on the current (compute) stream before and after each wait; between them
    nothing but the wait is queued. On the CPU a copy is timed too: compute stands still for it.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        """Pass everything on to ``link``; nothing is recorded before ``start``."""
        self._link = link
        self._device = device
        self._recording = False
        self._waits: list[tuple[int, Moment, Moment]] = []

    @property
    def bytes_moved(self) -> int:
        """Bytes copied so far."""
        return self._link.bytes_moved

    def copy(self, op: Copy) -> None:
        """Queue a copy."""
        if not self._recording or self._device.type == "cuda":
            self._link.copy(op)
            return
        before = mark(self._device)
        self._link.copy(op)
        self._waits.append((op.span.layer, before, mark(self._device)))

    def wait(self, op: Wait) -> None:
        """Wait for a slot, and note for how long if recording."""
        if not self._recording:
            self._link.wait(op)
            return
        before = mark(self._device)
        self._link.wait(op)
        self._waits.append((op.span.layer, before, mark(self._device)))

    def start(self) -> None:
        """Record from now on."""
        self._waits = []
        self._recording = True

    def stop(self) -> dict[int, float]:
        """Stop recording; return the seconds compute waited, by layer. Synchronises the device."""
        self._recording = False
        settle(self._device)
        stalls: dict[int, float] = {}
        for layer, before, after in self._waits:
            stalls[layer] = stalls.get(layer, 0.0) + seconds_between(before, after)
        self._waits = []
        return stalls


class SerialLink:
    """A link that compute joins after every copy: what offloading costs without overlap."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def bytes_moved(self) -> int:
        """Bytes copied so far."""
        return self._link.bytes_moved

    def copy(self, op: Copy) -> None:
        """Queue a copy and make compute issued from now on wait for it."""
        self._link.copy(op)
        self._link.wait(Wait(op.slot, op.span))

    def wait(self, op: Wait) -> None:
        """Wait for a slot, whose copy compute has already waited for."""
        self._link.wait(op)
