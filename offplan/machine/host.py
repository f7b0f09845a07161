"""What the operating system says about the host: how much can be pinned, and what is near."""

import os
from pathlib import Path

from offplan.cgroups import memory_groups


def pin_limit(
    pinned_bytes: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Find how many bytes can be pinned, and what limits them.

    ``pinned_bytes`` were pinned without trouble. NVIDIA's driver for Linux locks pages without
    counting them against ``ulimit -l``, so a limit below that does not hold; a larger one is taken
    at its word.
    """
    import resource  # not on Windows, where nothing is measured

    limits = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "physical memory")]
    limits += [
        (group.limit_bytes, "the memory limit of its control group")
        for group in memory_groups(proc, cgroup)
    ]
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if lockable != resource.RLIM_INFINITY and lockable >= pinned_bytes:
        limits.append((lockable, "ulimit -l"))
    return min(limits)


def find_numa_node(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Find the NUMA node of a device (``0000:1b:00.0``); None where the kernel names none.

    Source: the kernel's sysfs-bus-pci: -1 is a machine with one node, or firmware that is silent.
    """
    try:
        node = int((devices / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
