"""Host memory that the GPU can read: ordinary pages, registered with the driver.

Imports torch: for what runs or measures, never for planning.
"""

import contextlib
import mmap
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from offplan.errors import MemoryLimitError, Topic
from offplan.hostmem.limits import lock_limit
from offplan.units import format_bytes

REMEDY = "close what else takes memory"
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every GPU of the process."""
_OF_THIS_PROCESS = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,) if hasattr(mmap, "MAP_PRIVATE") else ()
"""Python's default are shared pages, which Linux takes for a file and gives no huge ones."""


class HostBlock:
    """A block of host memory of an exact size, page-locked when a CUDA device will read it.

    Anonymous pages registered with the driver cost about 0.08 s/GiB and keep their size. torch's
    pinned allocator costs 0.5 s/GiB and rounds up to a power of two.
    """

    def __init__(self, num_bytes: int, *, pin: bool, remedy: str = REMEDY) -> None:
        """Reserve ``num_bytes``; raises MemoryLimitError when the host does not give them.

        ``remedy`` is what the error then says to do.
        """
        self.nbytes = num_bytes
        self._remedy = remedy
        try:
            pages = mmap.mmap(-1, num_bytes, *_OF_THIS_PROCESS)
        except (OSError, ValueError) as error:
            raise MemoryLimitError(
                f"the host has no room for {format_bytes(num_bytes)} more ({error}); {remedy}",
                topic=Topic.HOST_MEMORY,
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        """The block's bytes on the CPU, uint8 of shape [nbytes]."""
        self._unregister: Any = None
        if pin:
            self.pin()

    def pin(self) -> None:
        """Page-lock the block, whatever it holds, for every CUDA device; raises MemoryLimitError.

        Lets other threads run meanwhile. Needs the device that will read it to be the current one.
        """
        cudart = torch.cuda.cudart()
        address = self.tensor.data_ptr()
        status = int(cudart.cudaHostRegister(address, self.nbytes, _PORTABLE))
        if status != 0:
            _clear_error()
            limit = lock_limit()
            lock = "unlimited" if limit is None else format_bytes(limit)
            raise MemoryLimitError(
                f"the driver could not page-lock {format_bytes(self.nbytes)} of host memory (CUDA "
                f"error {status}): check `ulimit -l` (now {lock}), the container's "
                f"memory limit and free memory, or {self._remedy}",
                topic=Topic.PAGE_LOCKS,
            )
        # Registered pages must be unregistered before they are freed: a later registration of the
        # same addresses would fail at some unrelated call.
        self._unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)

    def device_view(self, device: torch.device) -> torch.Tensor:
        """View the bytes as the GPU reads them in place, over the link: uint8 of shape [nbytes]."""
        return self.tensor if device.type == "cpu" else view_in_place(self.tensor, device)

    def close(self) -> None:
        """Unregister the pages and give them back; the GPU must be done with them.

        A view that is still held keeps them as ordinary memory.
        """
        if self._unregister is not None:
            self._unregister()
        self.tensor = self.tensor.new_empty(0)


def view_in_place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """View a HostBlock's bytes, or part of them, as a CUDA device reads them over the link.

    The block has to live as long. Source: CUDA array interface, version 3.
    """
    interface = {
        "shape": (tensor.numel(),),
        "typestr": "|u1",
        "data": (tensor.data_ptr(), False),
        "version": 3,
    }
    array = SimpleNamespace(tensor=tensor, __cuda_array_interface__=interface)
    return torch.as_tensor(array, device=device)


def _clear_error() -> None:
    """Clear CUDA's last error, which a call through ``cudart`` leaves for whoever looks next.

    torch offers no cudaGetLastError, and one found by name may be another library's. But torch asks
    for the error behind every kernel that it launches, raises what it finds and so clears it. If
    there is no memory for the kernel, torch's allocator clears it.
    """
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
