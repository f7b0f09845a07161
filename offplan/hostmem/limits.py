"""Limits on the host memory that a process may take or page-lock, and what it has taken."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from offplan.errors import MemoryLimitError
from offplan.hostmem.cgroups import memory_groups, read_numbers
from offplan.units import format_bytes


def peak_host_bytes() -> int:
    """Return the most bytes of host memory that this process had in use, mapped files included.

    Source: getrusage(2): ``ru_maxrss`` is in KiB on Linux and in bytes on macOS.
    """
    import resource  # not on Windows, where plans are made all the same

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def check_host_room(num_bytes: int, device_bytes: int = 0) -> None:
    """Raise MemoryLimitError when the host or its container cannot give ``num_bytes``.

    ``device_bytes`` of them a plan has on the GPU, and the CPU stands in for that.
    Past a container's limit the kernel ends the process without a word, so this is asked first.
    """
    room = min(host_room(Path("/proc"), Path("/sys/fs/cgroup")), default=None)
    if room is not None and num_bytes > room[0]:
        stands_in, instead = "", "plan with a smaller `host_memory`"
        if device_bytes:
            stands_in = (
                f" ({format_bytes(num_bytes - device_bytes)} as planned, and the "
                f"{format_bytes(device_bytes)} of a GPU, for which the CPU stands in)"
            )
            instead = "run the plan on a GPU"
        raise MemoryLimitError(
            f"the weights take {format_bytes(num_bytes)} of host memory{stands_in}; {room[1]} has "
            f"{format_bytes(room[0])} left: raise its limit, close what else uses it, or {instead}"
        )


def host_room(proc: Path, cgroup: Path) -> Iterator[tuple[int, str]]:
    """Yield bytes that can still be taken from each limit, and its name.

    Errs on the side of room: swap, and what the page cache holds, count as free. Limits that
    cannot be read are left out.
    """
    memory = read_numbers(proc / "meminfo")
    swap = memory.get("SwapFree", 0) * 2**10
    if "MemAvailable" in memory:
        yield memory["MemAvailable"] * 2**10 + swap, "this machine"
    for group in memory_groups(proc, cgroup):
        yield max(0, group.limit_bytes - group.used_bytes) + swap, f"the cgroup {group.folder}"


def memory_limit(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Find how many bytes of memory a process can have, and what limits them."""
    groups = memory_groups(proc, cgroup)
    limits = [(group.limit_bytes, "the memory limit of its control group") for group in groups]
    pages = os.sysconf("SC_PHYS_PAGES")
    physical = os.sysconf("SC_PAGE_SIZE") * pages // 2**20 * 2**20  # in whole MiB, as people say
    what = "physical memory, less what the operating system keeps"
    return min([(lockable_bytes(physical), what), *limits])


def lockable_bytes(ram_bytes: int, system: str = "linux") -> int:
    """Return the bytes of a machine's memory that its operating system leaves to be page-locked.

    Linux keeps a tenth, and 2 GiB at least. WSL2's virtual machine has half of the memory unless
    ``.wslconfig`` says otherwise, and its Linux keeps that part of it. Windows locks about half.
    Source: Microsoft, "Advanced settings configuration in WSL"; FreeToken's issue 55; the part of
    Linux is chosen.
    """
    if system == "windows":
        return ram_bytes // 2
    given = ram_bytes // 2 if system == "wsl2" else ram_bytes
    return given - min(max(given // 10, 2 * 2**30), given // 2)


def pin_limit(
    pinned_bytes: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Find how many bytes can be pinned, and what limits them.

    ``pinned_bytes`` were pinned without trouble. NVIDIA's driver for Linux locks pages without
    counting them against ``ulimit -l``, so a limit below that does not hold. A larger one is taken
    at its word.
    """
    limit, lockable = memory_limit(proc, cgroup), lock_limit()
    if lockable is not None and lockable >= pinned_bytes:
        return min(limit, (lockable, "ulimit -l"))
    return limit


def lock_limit() -> int | None:
    """Return the bytes that ``ulimit -l`` lets the process lock; None if it does not limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
