"""Host memory that the GPU can read, while it is measured."""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offplan.errors import MemoryLimitError
from offplan.machine.host import find_numa_node, pin_limit
from offplan.machine.measure_time import NUM_SAMPLES, figure, summarise
from offplan.units import format_bytes

PINNED_BYTES = 256 * 2**20
"""Size of a block that is pinned to be measured."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU, since others copy from it too."""


@contextmanager
def pinned(num_bytes: int) -> Iterator[torch.Tensor]:
    """Lend fresh host memory, registered with the driver as the runtime's store is.

    Waits for the current device before it is taken back. Raises MemoryLimitError.
    """
    block = _ordinary(num_bytes)
    _register(block)
    try:
        yield block
    finally:
        torch.cuda.synchronize()
        # registered pages must be unregistered before they are freed, or a later registration of
        # the same addresses fails at some unrelated call
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def as_device_array(block: torch.Tensor) -> torch.Tensor:
    """Present pinned memory as bytes that the current GPU reads in place, over the link.

    ``block`` has to live as long. Source: CUDA array interface, version 3.
    """

    class InPlace:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (block.numel(),),
            "typestr": "|u1",
            "data": (block.data_ptr(), False),
            "version": 3,
        }

    return torch.as_tensor(InPlace(), device=torch.device("cuda", torch.cuda.current_device()))


def measure_pinning() -> dict[str, object]:
    """Measure how fast memory is pinned, and find how much can be."""
    samples = []
    for _ in range(NUM_SAMPLES):
        block = _ordinary(PINNED_BYTES)
        start = time.perf_counter()
        _register(block)
        samples.append(time.perf_counter() - start)
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    timing = summarise(samples)
    limit, what = pin_limit(PINNED_BYTES)
    how = f"cudaHostRegister on {format_bytes(PINNED_BYTES)} of fresh memory"
    return {
        "pinning": figure(PINNED_BYTES / timing.seconds, how, timing.spread),
        "host_memory": figure(limit, f"what can be pinned: {what}"),
    }


def measure_place() -> dict[str, object]:
    """Find the NUMA node of the current device."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    # torch's stubs do not name these three
    domain, bus, device = (getattr(gpu, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    node = find_numa_node(f"{domain:04x}:{bus:02x}:{device:02x}.0")
    return {} if node is None else {"numa_node": figure(node, "numa_node of the PCI device")}


def _ordinary(num_bytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _register(block: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE))
    if status != 0:
        raise MemoryLimitError(
            f"the driver could not page-lock {format_bytes(block.nbytes)} of host memory to "
            f"measure the link with (CUDA error {status}): check `ulimit -l`, the container's "
            "memory limit and free memory"
        )
