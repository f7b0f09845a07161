"""Weights live in one arena on the device and in a slab of the store for each layer."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from offplan.errors import MemoryLimitError, PlanError
from offplan.hostmem.block import HostBlock
from offplan.placement import Phase, Placement, SlabEntry, Span, align
from offplan.runtime.device import on_device
from offplan.runtime.memory.peer import PeerBlock
from offplan.schedule import slots_read
from offplan.units import format_bytes

_REMEDY = "plan with a smaller --host-memory"


def reads_over_link(device: torch.device) -> bool:
    """Whether host memory must be page-locked for the device to read it."""
    return device.type == "cuda"


@dataclass(frozen=True)
class TensorSpec:
    """A parameter as the model wants it, and what it is made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[str, ...]
    """Names of the stored tensors that fill it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """View it in ``memory`` (bytes, shape [n]) at ``offset``."""
        return memory[offset : offset + self.nbytes].view(self.dtype).view(self.shape)


def allocate(num_bytes: int, device: torch.device, what: str) -> torch.Tensor:
    """Take bytes on the device; raises MemoryLimitError naming ``what`` they were for."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's out of memory, or the host's own
        free = f"; {format_bytes(torch.cuda.mem_get_info(device)[0])} are free" * (
            device.type == "cuda"
        )
        raise MemoryLimitError(
            f"the device has no room for {format_bytes(num_bytes)} of {what}{free}. Close what "
            "else uses it, or plan with a smaller --gpu-memory"
        ) from error


class WeightStore:
    """Memory for every weight of a plan, and the views that each phase computes with."""

    def __init__(
        self,
        placement: Placement,
        tensors: Mapping[str, TensorSpec],
        device: torch.device,
        peer: torch.device | None = None,
    ) -> None:
        """Allocate everything; nothing is loaded yet, nor page-locked.

        ``tensors`` are the model's, by parameter name. Slabs lie on ``peer``, another CUDA device,
        or in host memory. Raises PlanError where a plan places part of what is loaded as one, and
        MemoryLimitError.
        """
        self.device = device
        self.peer = peer
        self._blocks: dict[int, HostBlock | PeerBlock] = {}
        self._embedding: HostBlock | None = None
        owner = {stored: name for name, tensor in tensors.items() for stored in tensor.stored}
        offloaded = {
            _name_of(entry, owner, tensors): (slab.layer, entry)
            for slab in placement.slabs
            for entry in slab.entries
        }
        embedding = placement.host_embedding
        by_row = owner[embedding.name] if embedding is not None else None
        self._placement, self._tensors = placement, tensors
        self._entries, self._by_row = offloaded, by_row
        self.resident: dict[str, torch.Tensor] = {}
        """Views of the arena by parameter name."""
        self.offloaded: dict[str, torch.Tensor] = {}
        """Views of the slabs, and of the input embedding's host memory, by parameter name: weights
        off the device are loaded into them."""
        self.by_phase: dict[Phase, dict[str, torch.Tensor]] = {phase: {} for phase in Phase}
        """Views that each phase computes with, by parameter name, once all is page-locked."""
        self.arena = torch.empty(0, dtype=torch.uint8)
        """Bytes of all resident weights, on the device."""
        self.slots: list[torch.Tensor] = []
        """Slots of the ring, each of bytes on the device."""
        self.slabs: dict[int, torch.Tensor] = {}
        """Bytes of each slab by layer."""
        try:
            on_host = offloaded.keys() | {by_row}
            self._allocate_resident({n: t for n, t in tensors.items() if n not in on_host})
            self.slots = [
                allocate(placement.slot_bytes, device, "ring") for _ in range(placement.num_slots)
            ]
            host_block = partial(HostBlock, pin=False, remedy=_REMEDY)
            for slab in placement.slabs:
                if peer is None:
                    self._blocks[slab.layer] = host_block(slab.nbytes)
                else:
                    self._blocks[slab.layer] = PeerBlock(slab.nbytes, peer)
            if by_row is not None:
                self._embedding = host_block(tensors[by_row].nbytes)
        except BaseException:
            self.close()
            raise
        self.slabs = {layer: block.tensor for layer, block in self._blocks.items()}
        for name, (layer, entry) in offloaded.items():
            self.offloaded[name] = tensors[name].view(self.slabs[layer], entry.offset)
        if by_row is not None and self._embedding is not None:
            self.offloaded[by_row] = tensors[by_row].view(self._embedding.tensor, 0)

    @contextmanager
    def page_locking(self) -> Iterator[Callable[[], object]]:
        """Page-lock host memory beside what happens inside, and then take the views of it.

        Loading fills slabs from the first to the last, making their pages as it goes; page-locking
        goes the other way, so that each makes a part of them. Gives a function that raises what
        went wrong so far: MemoryLimitError.
        """
        stop = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="offplan-lock") as thread:
            work = thread.submit(self._page_lock, stop)
            try:
                yield lambda: work.result() if work.done() else None
                work.result()
            except BaseException:
                stop.set()
                raise
        for phase in Phase:
            self.by_phase[phase] = self._views(phase)

    def _page_lock(self, stop: threading.Event) -> None:
        if not reads_over_link(self.device):
            return
        blocks = [self._embedding, *self._blocks.values()]
        with on_device(self.device):
            for block in reversed(blocks):
                if isinstance(block, HostBlock) and not stop.is_set():
                    block.pin()

    def _views(self, phase: Phase) -> dict[str, torch.Tensor]:
        """View what is off the device where this phase reads it: in a slot, or where it lies."""
        in_place = {layer: block.device_view(self.device) for layer, block in self._blocks.items()}
        slots = slots_read(self._placement, phase)
        views = {}
        for name, (layer, entry) in self._entries.items():
            tensor = self._tensors[name]
            slot, span = slots.get(layer, (0, Span(layer, 0, 0)))
            if span.start <= entry.offset and entry.offset + entry.unit.nbytes <= span.stop:
                views[name] = tensor.view(self.slots[slot], entry.offset - span.start)
            else:
                views[name] = tensor.view(in_place[layer], entry.offset)
        if self._by_row is not None and self._embedding is not None:
            table = self._embedding.device_view(self.device)
            views[self._by_row] = self._tensors[self._by_row].view(table, 0)
        return views

    @property
    def embedding(self) -> torch.Tensor | None:
        """Bytes of the input embedding on the host, if it lies there."""
        return self._embedding.tensor if self._embedding is not None else None

    def close(self) -> None:
        """Give all memory back; the device must be idle. Views held elsewhere keep what they see.

        Dictionaries and lists are emptied in place, for whoever holds them: a link holds two.
        """
        for views in (self.resident, self.offloaded, *self.by_phase.values()):
            views.clear()
        self.slots.clear()
        self.slabs.clear()
        self.arena = torch.empty(0, dtype=torch.uint8)  # asks nothing of a device that failed
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        if self._embedding is not None:
            self._embedding.close()

    def _allocate_resident(self, wanted: Mapping[str, TensorSpec]) -> None:
        total = sum(align(tensor.nbytes) for tensor in wanted.values())
        # one block: the allocator would round thousands of tensors up, beyond what was planned
        self.arena = allocate(total, self.device, "resident weights")
        offset = 0
        for name, tensor in wanted.items():
            self.resident[name] = tensor.view(self.arena, offset)
            offset += align(tensor.nbytes)


def _name_of(
    entry: SlabEntry,
    owner: Mapping[str, str],
    tensors: Mapping[str, TensorSpec],
) -> str:
    """Find the parameter that a slab's entry is loaded as; raises PlanError for part of one."""
    stored = [tensor for p in entry.unit.parameters for tensor in p.tensors]
    names = {owner[tensor.name] for tensor in stored}
    name = min(names)
    alone = len(names) == 1 and len(tensors[name].stored) == len(stored)
    if not alone:
        raise PlanError(
            f"layer {entry.unit.layer}: {entry.unit.name} is loaded together with other "
            f"parameters ({', '.join(sorted(names))}); name all of them in "
            "cpu_offload_params or none"
        )
    if tensors[name].nbytes != entry.unit.nbytes:
        raise PlanError(
            f"layer {entry.unit.layer}: {entry.unit.name} is stored in "
            f"{format_bytes(entry.unit.nbytes)} and used in "
            f"{format_bytes(tensors[name].nbytes)}; a parameter that is split or changes type "
            "when it is loaded cannot be offloaded"
        )
    return name
