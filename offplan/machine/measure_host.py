"""Measures host memory that the GPU can read: how it is pinned, and where it lies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from offplan.hostmem.block import HostBlock
from offplan.hostmem.limits import pin_limit
from offplan.machine.measure_time import NUM_SAMPLES, figure, summarise
from offplan.units import format_bytes

PINNED_BYTES = 256 * 2**20
"""Bytes of a block that is pinned to be measured."""


@contextmanager
def pinned(num_bytes: int) -> Iterator[torch.Tensor]:
    """Lend the bytes of a HostBlock, such as the runtime's store is made of.

    Waits for the current device before they are taken back. Raises MemoryLimitError.
    """
    block = HostBlock(num_bytes, pin=True)
    try:
        yield block.tensor
    finally:
        torch.cuda.synchronize()
        block.close()


def measure_pinning() -> dict[str, object]:
    """Measure how fast memory is pinned, and find how much can be."""
    samples = []
    for _ in range(NUM_SAMPLES):
        start = time.perf_counter()
        block = HostBlock(PINNED_BYTES, pin=True)
        samples.append(time.perf_counter() - start)
        block.close()
    timing = summarise(samples)
    limit, what = pin_limit(PINNED_BYTES)
    how = f"cudaHostRegister on {format_bytes(PINNED_BYTES)} of fresh memory"
    return {
        "pinning": figure(PINNED_BYTES / timing.seconds, how, timing.spread),
        "host_memory": figure(limit, f"what can be pinned: {what}"),
    }


def measure_place() -> dict[str, object]:
    """Find the NUMA node of the current device, and how many there are, as figures."""
    found = {
        "numa_node": (find_gpu_node(), "numa_node of the PCI device"),
        "numa_nodes": (count_numa_nodes(), "nodes whose cpulist is not empty"),
    }
    return {name: figure(value, how) for name, (value, how) in found.items() if value is not None}


def count_numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> int | None:
    """Count the host's NUMA nodes with cores; None if the kernel lists none.

    Memory of a GPU may be a node as well, without cores. Source: the kernel's sysfs-devices-node.
    """
    lists = [path.read_text().strip() for path in nodes.glob("node[0-9]*/cpulist")]
    return sum(map(bool, lists)) or None


def find_gpu_node() -> int | None:
    """Find the NUMA node of the current device; None if the kernel names none."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    # torch's stubs do not name these three
    domain, bus, device = (getattr(gpu, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return find_numa_node(f"{domain:04x}:{bus:02x}:{device:02x}.0")


def find_numa_node(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Find the NUMA node of a device (``0000:1b:00.0``); None if the kernel names none.

    Source: the kernel's sysfs-bus-pci: -1 is a machine with one node, or firmware that is silent.
    """
    try:
        node = int((devices / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
