"""How much host memory a process may page-lock."""

import resource
from pathlib import Path

import pytest

from offplan.errors import MemoryLimitError
from offplan.hostmem import limits
from offplan.hostmem.limits import core_quota, pin_limit

KEEPS = "physical memory, less what the operating system keeps"


@pytest.fixture
def lockable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft limit of what may be locked, and physical memory of 1 GiB."""
    limit = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit[0], resource.RLIM_INFINITY))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}.get)
    return limit


@pytest.mark.parametrize(
    ("group", "ulimit", "expected"),
    [
        (None, None, (2**29, KEEPS)),
        (2**28, None, (2**28, "the memory limit of its control group")),
        (2**40, None, (2**29, KEEPS)),
        (None, 2**28, (2**28, "ulimit -l")),
        (None, 2**16, (2**29, KEEPS)),  # more was pinned: it does not hold
    ],
)
def test_the_least_limit_counts(
    tmp_path: Path,
    lockable: list[int],
    group: int | None,
    ulimit: int | None,
    expected: tuple[int, str],
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max" if group is None else str(group))
    (tmp_path / "memory.current").write_text("4096")
    if ulimit is not None:
        lockable[0] = ulimit
    assert pin_limit(2**27, proc=tmp_path, cgroup=tmp_path) == expected


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        (
            "3:cpu,cpuacct:/\n2:memory:/\n",
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_cores(
    tmp_path: Path, group: str, files: dict[str, str], expected: float | None
) -> None:
    for name, text in {"self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_quota(proc=tmp_path, cgroup=tmp_path) == expected


def test_a_cpu_that_stands_in_for_a_gpu_is_why_more_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "host_room", lambda *_: [(2**30, "this machine")])
    with pytest.raises(MemoryLimitError) as told:
        limits.check_host_room(5 * 2**30, 3 * 2**30)
    assert str(told.value) == (
        "the weights take 5 GiB of host memory (2 GiB as planned, and the 3 GiB of a GPU, for "
        "which the CPU stands in); this machine has 1 GiB left: raise its limit, close what else "
        "uses it, or run the plan on a GPU"
    )
