"""Executes a store on another GPU, which is found and checked."""

import torch
from typing_extensions import Self

from offplan.errors import MemoryLimitError, Topic
from offplan.runtime.loading.capability import CapabilityExecutor, Prepared
from offplan.units import format_bytes


class PeerExecutor(CapabilityExecutor):
    """Has slabs lie on another GPU; on the CPU, host memory stands in for it."""

    def __init__(self, slab_bytes: int) -> None:
        """Note how much the GPU has to have free."""
        self._slab_bytes = slab_bytes

    @classmethod
    def find(cls, prepared: Prepared) -> Self | None:
        """Return an executor if a plan has anything in slabs on a second GPU."""
        placement, is_peer = prepared.placement, prepared.offload.store == "peer"
        return cls(placement.slab_bytes) if is_peer and placement.slabs else None

    def prepare(self, device: torch.device, host_threads: int | None) -> None:
        """Find the GPU; raises MemoryLimitError."""
        if device.type == "cuda":
            self.slab_device = find_peer(device, self._slab_bytes)


def find_peer(device: torch.device, num_bytes: int) -> torch.device:
    """Find the first other CUDA device that reaches ``device`` directly, ``num_bytes`` free.

    Memory that torch has cached there counts as free. Asking makes a context on each device that is
    asked, which takes some of its memory. Raises MemoryLimitError, naming what was found, when none
    will do.
    """
    own = torch.cuda.current_device() if device.index is None else device.index
    found = []
    for other in range(torch.cuda.device_count()):
        if other == own:
            continue
        # torch copies between GPUs from the source's side: it is the peer that needs access
        if not torch.cuda.can_device_access_peer(other, own):
            found.append(f"cuda:{other} without peer access to cuda:{own}")
            continue
        cached = torch.cuda.memory_reserved(other) - torch.cuda.memory_allocated(other)
        free = torch.cuda.mem_get_info(other)[0] + cached
        if free >= num_bytes:
            return torch.device("cuda", other)
        found.append(f"cuda:{other} with {format_bytes(free)} free")
    raise MemoryLimitError(
        f"`store: peer` needs a second GPU with peer access to cuda:{own} and "
        f"{format_bytes(num_bytes)} free; found {', '.join(found) or 'no other GPU'}. Close what "
        "else uses it, show this process more GPUs (CUDA_VISIBLE_DEVICES), or plan with "
        "`store: host`",
        topic=Topic.GPU_MEMORY,
    )
