"""Weights in an arena on the device and a slab of the store for each layer, and who serves them."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from offplan.backends import Backend
from offplan.errors import MemoryLimitError, OffplanError, Topic
from offplan.hostmem.block import HostBlock
from offplan.placement import Phase, Placement, Span, align
from offplan.runtime.device import on_device
from offplan.schedule import Serve, slots_read
from offplan.units import format_bytes


class Server:
    """Serves what one session reads in place by one backend: kernels read it where it lies.

    A server that does more overrides what it does. Works on the current stream.
    """

    bytes_moved = 0
    """Bytes that it had cross the link so far; what kernels read in place nobody counts."""
    hangs = False
    """True once closed if a thread that hangs may still read weights, which then have to stay."""

    def __init__(self, device: torch.device) -> None:
        """Serve what is read on a device."""

    def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a layer computes with in a phase.

        ``stored`` is the same weight in its slab, in memory that the device can read. Asked once
        for each weight before any pass; what is returned keeps its address.
        """
        return stored

    def serve(self, phase: Phase, layer: int) -> None:
        """Fetch what the layer is about to compute with, where the backend ``is_served``."""

    def invalidate(self) -> None:
        """Rely on nothing that a pass has begun: it may have been aborted."""

    def check(self) -> None:
        """Raise OffplanError if what was served since the session began may be wrong."""

    def close(self) -> None:
        """Give memory back; the device is idle."""


SERVERS: dict[Backend, Callable[[torch.device], Server]] = {Backend.UVA: Server}
"""Server of each backend that reads in place, beside those that executors of capabilities have. The
ring serves backends that stream."""


_REMEDY = "plan with a smaller `host_memory`"


def table_layer(number: int) -> int:
    """Return what stands for the layer of a table on the host, which is in no slab: below 0."""
    return -1 - number


def reads_over_link(device: torch.device) -> bool:
    """Return True if host memory must be page-locked for the device to read it."""
    return device.type == "cuda"


def allocate(
    num_bytes: int, device: torch.device, what: str, remedy: str = "a smaller `gpu_memory`"
) -> torch.Tensor:
    """Take bytes on a device; raises MemoryLimitError naming ``what`` they were for.

    ``remedy`` is what the error then says to plan with.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's out of memory, or the host's own
        free = f"; {format_bytes(torch.cuda.mem_get_info(device)[0])} are free" * (
            device.type == "cuda"
        )
        raise MemoryLimitError(
            f"{device} has no room for {format_bytes(num_bytes)} of {what}{free}. Close what "
            f"else uses it, or plan with {remedy}",
            topic=Topic.GPU_MEMORY if device.type == "cuda" else Topic.HOST_MEMORY,
        ) from error


def view_as(wanted: torch.Tensor, memory: torch.Tensor, offset: int) -> nn.Parameter:
    """View ``memory``, bytes of shape [n], from ``offset`` on as a parameter like ``wanted``."""
    view = memory[offset : offset + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
    return nn.Parameter(view, requires_grad=False)


_left: list[HostBlock] = []
"""Weights that hung threads may still read: they are never given back."""


Offloaded = Mapping[str, tuple[int, int]]
"""Layer, and offset in its slab, of what is off the device, by parameter name."""


class WeightStore:
    """Memory for every weight of a plan, and the views that each phase computes with."""

    def __init__(
        self,
        placement: Placement,
        wanted: Mapping[str, torch.Tensor],
        offloaded: Offloaded,
        device: torch.device,
        slab_device: torch.device | None = None,
        servers: Mapping[Backend, Callable[[torch.device], Server]] | None = None,
    ) -> None:
        """Allocate everything; nothing is loaded yet, nor page-locked.

        ``wanted`` are the model's tensors by parameter name, on the meta device. Slabs lie on
        ``slab_device``, another CUDA device, or on the host if None. ``servers`` serve backends
        that SERVERS has none for. Raises MemoryLimitError.
        """
        self.device, self.slab_device, self._makers = device, slab_device, servers or {}
        self.placement, self._wanted = placement, wanted
        self._blocks: dict[int, HostBlock] = {}
        """Host memory by layer."""
        self._places = offloaded
        self.resident: dict[str, nn.Parameter] = {}
        """Views of the arena by parameter name."""
        self.offloaded: dict[str, nn.Parameter] = {}
        """Views of the slabs, and of the tables' host memory, by parameter name: weights off the
        device are loaded into them."""
        self.by_phase: dict[Phase, dict[str, nn.Parameter]] = {phase: {} for phase in Phase}
        """Views that each phase computes with, by parameter name, once all is page-locked."""
        self.in_place: dict[Phase, set[str]] = {phase: set() for phase in Phase}
        """Names of the parameters that each phase reads where they lie off the device."""
        self.servers: dict[Backend, Server] = {}
        """The server of each backend that reads at use."""
        self.fetched: dict[tuple[Phase, int, int], nn.Parameter] = {}
        """What servers fetch weights into, by phase, layer and offset in its slab."""
        self.arena = torch.empty(0, dtype=torch.uint8)
        """Bytes of all resident weights, on the device."""
        self.slots: list[torch.Tensor] = []
        """Slots of the ring, each of bytes on the device."""
        self.slabs: dict[int, torch.Tensor] = {}
        """Bytes of each slab by layer, and those of tables on the host by ``table_layer``."""
        sizes = {table_layer(n): each.nbytes for n, each in enumerate(placement.host_tables)}
        sizes |= {slab.layer: slab.nbytes for slab in placement.slabs}
        try:
            self._allocate_resident()
            self.slots = [allocate(size, device, "ring") for size in placement.slot_sizes]
            for layer, num_bytes in sizes.items():
                if slab_device is None or layer < 0:
                    block = HostBlock(num_bytes, pin=False, remedy=_REMEDY)
                    self._blocks[layer], self.slabs[layer] = block, block.tensor
                else:
                    what, remedy = "offloaded weights", "`store: host`"
                    self.slabs[layer] = allocate(num_bytes, slab_device, what, remedy)
        except BaseException:
            self.close()
            raise
        for name, (layer, offset) in self._places.items():
            self.offloaded[name] = view_as(wanted[name], self.slabs[layer], offset)

    def page_lock(self) -> None:
        """Page-lock host memory that was filled, and take each phase's views.

        Raises MemoryLimitError. Source: 5.3 GB that loading had filled were page-locked in 0.2 s on
        an H200; beside loading they took 2 s and held it up by 1.2, since the driver had to make
        the pages and kept all else that called it waiting.
        """
        if reads_over_link(self.device):
            with on_device(self.device):
                for block in self._blocks.values():
                    block.pin()
        for phase in Phase:
            self.by_phase[phase] = self._views(phase)

    def _views(self, phase: Phase) -> dict[str, nn.Parameter]:
        """View what is off the device where this phase reads it: in a slot, or where it lies."""
        on_host = {layer: block.device_view(self.device) for layer, block in self._blocks.items()}
        in_place = self.slabs | on_host  # no plan has a kernel read another GPU's memory
        slots = slots_read(self.placement, phase)
        entries = {(s.layer, each.offset): each for s in self.placement.slabs for each in s.entries}
        views = {}
        for name, (layer, offset) in self._places.items():
            wanted = self._wanted[name]
            slot, span = slots.get(layer, (0, Span(layer, 0, 0)))
            entry = entries.get((layer, offset))
            is_left = entry is not None and entry.reads_ring(phase)
            if is_left and span.start <= offset and offset + wanted.nbytes <= span.stop:
                views[name] = view_as(wanted, self.slots[slot], offset - span.start)
            else:
                stored = view_as(wanted, in_place[layer], offset)
                backend = entry.backend(phase) if entry else Backend.UVA
                # where it should be in a slot, ``verify_places`` says so; passes that read parts
                # of it are given these
                views[name] = stored
                if not backend.streams:
                    views[name] = self._server(backend).view(phase, layer, stored)
                if views[name] is stored:
                    self.in_place[phase].add(name)
                else:
                    self.fetched[phase, layer, offset] = views[name]
        return views

    def _server(self, backend: Backend) -> Server:
        if backend not in self.servers:
            make = self._makers.get(backend) or SERVERS[backend]
            self.servers[backend] = make(self.device)
        return self.servers[backend]

    def serve(self, op: Serve) -> None:
        """Have a layer's weights fetched that it reads at use, on the current stream."""
        self.servers[op.backend].serve(op.phase, op.layer)

    def invalidate(self) -> None:
        """Have servers rely on nothing that an aborted pass has begun."""
        for server in self.servers.values():
            server.invalidate()

    def layer_of(self, name: str) -> int:
        """Return the layer of a parameter off the device, or what stands for a table's."""
        return self._places[name][0]

    def check(self) -> None:
        """Raise OffplanError where what servers did may be wrong, once its tokens are read."""
        for server in self.servers.values():
            server.check()

    @property
    def bytes_served(self) -> int:
        """Bytes that servers had cross the link so far."""
        return sum(server.bytes_moved for server in self.servers.values())

    def close(self) -> None:
        """Give all memory back; the device must be idle. Views held elsewhere keep what they see.

        Dictionaries and lists are emptied in place, for whoever holds them: a link holds two.
        Raises OffplanError if a server hangs, once all is given back but what it may read.
        """
        for views in (self.resident, self.offloaded, *self.by_phase.values()):
            views.clear()
        self.fetched.clear()
        self.slots.clear()
        self.slabs.clear()
        for server in self.servers.values():
            server.close()
        hangs = any(server.hangs for server in self.servers.values())
        self.servers.clear()
        self.arena = torch.empty(0, dtype=torch.uint8)  # asks nothing of a device that failed
        blocks = [*self._blocks.values()]
        self._blocks.clear()
        if hangs:  # a page that is gone would end the process
            _left.extend(blocks)
            num_bytes = sum(block.nbytes for block in blocks)
            raise OffplanError(
                f"a thread of the host hangs, and may still read weights: their "
                f"{format_bytes(num_bytes)} of host memory stay taken until this process ends. "
                "Begin another one; if it comes again, plan without the host's cores: `offplan "
                "replan PLAN --no-host-cores`"
            )
        for block in blocks:
            block.close()

    def _allocate_resident(self) -> None:
        tensors = {n: tensor for n, tensor in self._wanted.items() if n not in self._places}
        total = sum(align(tensor.nbytes) for tensor in tensors.values())
        # one block: the allocator would round thousands of tensors up, beyond what was planned
        self.arena = allocate(total, self.device, "resident weights")
        offset = 0
        for name, tensor in tensors.items():
            self.resident[name] = view_as(tensor, self.arena, offset)
            offset += align(tensor.nbytes)
