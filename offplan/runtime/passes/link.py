"""The link carries out a schedule's copies and waits, on a GPU or on the CPU."""

from collections.abc import Mapping
from typing import Protocol

import torch

from offplan.schedule import Copy, Wait


class Link(Protocol):
    """Moves spans of slabs into slots, in the order they are asked for."""

    @property
    def bytes_moved(self) -> int:
        """Bytes copied so far."""

    def copy(self, op: Copy) -> None:
        """Queue a copy; it starts once all compute issued so far is done."""

    def wait(self, op: Wait) -> None:
        """Make compute issued from now on wait for the slot's copy."""


class CudaLink:
    """One copy stream; ordered against the compute stream by events, never by the host.

    Streams: ``copy`` records an event on the current (compute) stream, makes the copy stream wait
    for it, copies there and records the slot's event. ``wait`` makes the current stream wait for
    that event. Copies are never joined at the end of a pass: the link stays busy through sampling
    and into the next one.

    From another GPU's slabs torch copies on a stream of that GPU, which it has wait for the copy
    stream before, and the copy stream for it after, by events (Source: ``copy_device_to_device`` in
    ATen/native/cuda/Copy.cu). Each slot then has a copy stream of its own, or a copy would begin
    only once both GPUs had seen the one before it end; the other GPU's stream keeps their order.
    """

    def __init__(
        self, slots: list[torch.Tensor], slabs: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        self.bytes_moved = 0
        self._slots = slots
        self._slabs = slabs
        self._streams = [torch.cuda.Stream(device)] * len(slots)
        self._source_stream: torch.cuda.Stream | None = None
        peer = next((slab.device for slab in slabs.values() if slab.is_cuda), None)
        if peer is not None:
            self._streams = [torch.cuda.Stream(device) for _ in slots]
            # not the default one, where copies would queue behind whatever else that GPU is given
            self._source_stream = torch.cuda.Stream(peer)
            # loading may still be writing the slabs
            self._source_stream.wait_stream(torch.cuda.current_stream(peer))
        self._ready = [torch.cuda.Event() for _ in slots]
        self._free = [torch.cuda.Event() for _ in slots]

    def copy(self, op: Copy) -> None:
        """Queue the DMA behind the compute issued so far."""
        span, stream = op.span, self._streams[op.slot]
        # without this the DMA could overwrite a slot that a running kernel still reads
        self._free[op.slot].record()
        stream.wait_event(self._free[op.slot])
        with torch.cuda.stream(stream):
            source = self._slabs[span.layer][span.start : span.stop]
            with torch.cuda.stream(self._source_stream):
                self._slots[op.slot][: span.nbytes].copy_(source, non_blocking=True)
            self._ready[op.slot].record()
        self.bytes_moved += span.nbytes

    def wait(self, op: Wait) -> None:
        """Order the current stream behind the slot's DMA."""
        torch.cuda.current_stream().wait_event(self._ready[op.slot])


class CpuLink:
    """A link on the CPU, where a copy happens at once or as late as the schedule allows.

    Both are legal orders of a right schedule; with a wrong one at least one of them computes with
    another layer's weights.
    """

    def __init__(
        self, slots: list[torch.Tensor], slabs: Mapping[int, torch.Tensor], *, late: bool = False
    ) -> None:
        self.bytes_moved = 0
        self._slots = slots
        self._slabs = slabs
        self._late = late
        self._pending: list[Copy] = []

    def copy(self, op: Copy) -> None:
        """Copy now, or remember to."""
        self._pending.append(op)
        if not self._late:
            self._drain(op.slot)

    def wait(self, op: Wait) -> None:
        """Perform what is pending, in order, up to this slot's copy."""
        self._drain(op.slot)

    def _drain(self, slot: int) -> None:
        while any(op.slot == slot for op in self._pending):
            op = self._pending.pop(0)
            source = self._slabs[op.span.layer][op.span.start : op.span.stop]
            self._slots[op.slot][: op.span.nbytes].copy_(source)
            self.bytes_moved += op.span.nbytes
