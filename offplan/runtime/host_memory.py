"""How much host memory the process has taken, and how much it may still take."""

import sys
from collections.abc import Iterator
from pathlib import Path

from offplan.errors import MemoryLimitError
from offplan.units import format_bytes


def peak_host_bytes() -> int:
    """The most host memory that this process has had in use, pages of mapped files included.

    Source: getrusage(2): ``ru_maxrss`` is in KiB on Linux and in bytes on macOS.
    """
    import resource  # not on Windows, where sessions on the CPU run all the same

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def check_host_room(num_bytes: int) -> None:
    """Raise MemoryLimitError when the host or its container cannot give ``num_bytes``.

    Past a container's limit the kernel ends the process without a word, so this is asked first.
    """
    room = min(host_room(Path("/proc"), Path("/sys/fs/cgroup")), default=None)
    if room is not None and num_bytes > room[0]:
        raise MemoryLimitError(
            f"the weights take {format_bytes(num_bytes)} of host memory; {room[1]} has "
            f"{format_bytes(room[0])} left: raise its limit, close what else uses it, or plan with "
            "a smaller --host-memory"
        )


def host_room(proc: Path, cgroup: Path) -> Iterator[tuple[int, str]]:
    """Yield bytes that can still be taken from each limit, and its name.

    Errs on the side of room: swap, and what the page cache holds, count as free. Limits that
    cannot be read are left out. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    memory = _read_numbers(proc / "meminfo")
    swap = memory.get("SwapFree", 0) * 2**10
    if "MemAvailable" in memory:
        yield memory["MemAvailable"] * 2**10 + swap, "this machine"
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names, prefix = cgroup, ("memory.max", "memory.current"), ""
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            base, prefix = cgroup / "memory", "total_"
        else:
            continue
        group = base / path.strip("/")
        # a limit of any group above holds too; in a container the path may not be visible
        for folder in [group, *group.parents][: len(Path(path).parts)]:
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                stat = _read_numbers(folder / "memory.stat")
                cached = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
                yield max(0, int(limit) - int(used) + cached) + swap, f"the cgroup {folder}"


def _read_numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    words = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {key: int(value) for key, value, *_ in words if value.isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
