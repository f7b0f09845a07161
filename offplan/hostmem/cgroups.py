"""The limits of the control groups that this process is in: memory, and time of cores."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
    for line in read_text(proc / "self" / "cgroup").splitlines():
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
            limit, used = (read_text(folder / name).strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                stat = read_numbers(folder / "memory.stat")
                cached = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
                yield MemoryGroup(folder, int(limit), int(used) - cached)


def core_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Find how many cores' time this process may take; None if no group limits it.

    Source: the kernel's cgroup-v2.rst (``cpu.max``) and scheduler/sched-bwc.rst.
    """
    quotas = []
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroup, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, names = cgroup / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = base / path.strip("/")
        for folder in [group, *group.parents][: len(Path(path).parts)]:
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
