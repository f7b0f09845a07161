"""The link carries out a schedule's copies and waits, on a GPU or on the CPU."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Protocol

import torch

from offplan.placement import Phase, Placement
from offplan.schedule import Calls, Copy, Schedule, Wait, build_pass, empty_ring


class Link(Protocol):
    """Moves spans of slabs into slots, in the order they are asked for."""

    @property
    def bytes_moved(self) -> int:
        """Bytes copied so far."""

    def copy(self, op: Copy) -> None:
        """Queue a copy; it starts once all compute issued so far is done."""

    def wait(self, op: Wait) -> None:
        """Make compute issued from now on wait for the slot's copy."""


class CpuLink:
    """A link on the CPU, where a copy is done at once and nothing is left to wait for."""

    def __init__(self, slots: list[torch.Tensor], slabs: Mapping[int, torch.Tensor]) -> None:
        self.bytes_moved = 0
        self._slots, self._slabs = slots, slabs

    def copy(self, op: Copy) -> None:
        """Fill the slot; on a GPU its current stream does it."""
        slab, slot = self._slabs[op.span.layer], self._slots[op.slot]
        for start, stop, at in op.span.runs:
            slot[at : at + stop - start].copy_(slab[start:stop], non_blocking=True)
        self.bytes_moved += op.span.nbytes

    def wait(self, op: Wait) -> None:
        """Do nothing: the slot was filled when that was asked for."""


class CudaLink(CpuLink):
    """One copy stream; ordered against the compute stream by events, never by the host.

    Streams: ``copy`` records an event on the current (compute) stream, makes the copy stream wait
    for it, copies there and records the slot's event. ``wait`` makes the current stream wait for
    that event. Copies are never joined at the end of a pass: the link stays busy through sampling
    and into the next one.

    From another GPU's slabs torch copies on a stream of that GPU. By events torch has that stream
    wait for the copy stream before, and the copy stream for it after (Source:
    ``copy_device_to_device`` in ATen/native/cuda/Copy.cu). Each slot then has a copy stream of its
    own. Otherwise a copy would begin only once both GPUs had seen the one before it end. The other
    GPU's stream keeps their order.
    """

    def __init__(self, slots: list[torch.Tensor], slabs: Mapping[int, torch.Tensor]) -> None:
        """Move from ``slabs`` to ``slots``, which lie on the current device."""
        super().__init__(slots, slabs)
        self._streams = [torch.cuda.Stream()] * len(slots)
        self._source_stream: torch.cuda.Stream | None = None
        other = next((slab.device for slab in slabs.values() if slab.is_cuda), None)
        if other is not None:
            self._streams = [torch.cuda.Stream() for _ in slots]
            # not the default one, where copies would queue behind whatever else that GPU is given
            self._source_stream = torch.cuda.Stream(other)
            # loading may still be writing the slabs
            self._source_stream.wait_stream(torch.cuda.current_stream(other))
        self._ready = [torch.cuda.Event() for _ in slots]
        self._free = [torch.cuda.Event() for _ in slots]

    def copy(self, op: Copy) -> None:
        """Queue the DMA behind the compute issued so far."""
        stream = self._streams[op.slot]
        # without this the DMA could overwrite a slot that a running kernel still reads
        self._free[op.slot].record()
        stream.wait_event(self._free[op.slot])
        with torch.cuda.stream(stream):
            with torch.cuda.stream(self._source_stream):
                super().copy(op)
            self._ready[op.slot].record()

    def wait(self, op: Wait) -> None:
        """Order the current stream behind the slot's DMA."""
        torch.cuda.current_stream().wait_event(self._ready[op.slot])


class PassSchedules:
    """Builds the schedule of each pass, and knows what the pass leaves in the ring."""

    def __init__(self, placement: Placement, num_layers: int, calls: Calls | None = None) -> None:
        """Schedule passes that call the layers as ``calls`` says, each once if left out."""
        self._placement = placement
        self._ring = empty_ring(placement)
        # schedules soon repeat, and of 64 layers one takes 0.6 ms to make
        self._build = cache(partial(build_pass, placement, num_layers, calls=calls))

    def next(self, phase: Phase, following: Phase = Phase.DECODE, num_chunks: int = 1) -> Schedule:
        """Return the schedule of a pass that one of the phase ``following`` follows."""
        if not self._placement.chunks_at_once:
            num_chunks = 1  # however many there are, the schedule is the same
        schedule: Schedule = self._build(phase, self._ring, following, num_chunks=num_chunks)
        self._ring = schedule.after
        return schedule

    def invalidate(self) -> None:
        """Believe the ring empty, whatever was copied there or is on its way."""
        self._ring = empty_ring(self._placement)
