"""Limits on the host memory that a process may take or page-lock, and what it has taken."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offplan.errors import MemoryLimitError, Topic
from offplan.units import format_bytes

_SOLD_GIB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Memory that machines have, in GiB. Source: kits of modules for desktops and servers."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group that limits memory."""

    folder: Path
    limit_bytes: int
    used_bytes: int
    """Bytes that its processes take; those of the page cache are left out: they can be dropped."""


def memory_groups(proc: Path, cgroup: Path) -> Iterator[MemoryGroup]:
    """Yield the groups with a limit, from this process's own up to the outermost one visible.

    ``proc`` and ``cgroup`` are where the kernel's file systems are mounted. Groups without a limit,
    or that cannot be read, are left out. Source: the kernel's cgroup-v2.rst and
    cgroup-v1/memory.rst.
    """
    for is_unified, folder in _list_groups(proc, cgroup, "memory"):
        names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        if is_unified:
            names, prefix = ("memory.max", "memory.current"), ""
        limit, used = (read_text(folder / name).strip() for name in names)
        if limit.isdecimal() and used.isdecimal():
            stat = read_numbers(folder / "memory.stat")
            cached = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
            yield MemoryGroup(folder, int(limit), int(used) - cached)


def _list_groups(proc: Path, cgroup: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield folders of a controller's groups, from this process's own up; True for cgroup v2's."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = (cgroup / controller if controllers else cgroup) / path.strip("/")
        # a limit of any group above holds too; in a container the path may not be visible
        for folder in [group, *group.parents][: len(Path(path).parts)]:
            yield not controllers, folder


def core_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Find how many cores' time this process may take; None if no group limits it.

    Source: the kernel's cgroup-v2.rst (``cpu.max``) and scheduler/sched-bwc.rst.
    """
    quotas = []
    for is_unified, folder in _list_groups(proc, cgroup, "cpu"):
        names = ["cpu.max"] if is_unified else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        words = " ".join(read_text(folder / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_numbers(path: Path) -> dict[str, int]:
    """Read the first number of each line, by the line's first word."""
    words = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {key: int(value) for key, value, *_ in words if value.isdecimal()}


def read_text(path: Path) -> str:
    """Read a file of the kernel's; empty if there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


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
    room = least_room()
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
            f"{format_bytes(room[0])} left: raise its limit, close what else uses it, or {instead}",
            topic=Topic.HOST_MEMORY,
        )


def least_room() -> tuple[int, str] | None:
    """Return the least of what ``host_room`` yields here, with its name; None if nothing limits."""
    return min(host_room(Path("/proc"), Path("/sys/fs/cgroup")), default=None)


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


def find_ram(locked_bytes: int, system: str) -> int | None:
    """Find the least memory that machines are sold with of which so much can be page-locked.

    None if no machine has so much. ``system`` is that of ``lockable_bytes``.
    """
    sold = sold_sizes()
    return next((ram for ram in sold if lockable_bytes(ram, system) >= locked_bytes), None)


def sold_sizes() -> Iterator[int]:
    """Yield the bytes of memory that machines are sold with, the least first."""
    return (size << 30 for size in _SOLD_GIB)


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
