"""Whether other processes keep the cores busy, from figures of the kernel's that are made up."""

import os
import time
from pathlib import Path

import pytest

from offplan.hostmem.busy import Watch, spread_of_half

HERTZ = os.sysconf("SC_CLK_TCK")


def write(proc: Path, *busy_s: float) -> None:
    """Write what four cores did: half of it for programs, half for another guest; and wait."""
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
    for core, each in enumerate(busy_s):
        ticks = round(each * HERTZ / 2)
        lines.append(f"cpu{core} {ticks} 0 0 700 80 0 0 {ticks} 60 0")
    (proc / "stat").write_text("\n".join([*lines, "intr 5 6"]), "utf-8")


@pytest.mark.parametrize(
    ("before", "behind", "why"),
    [
        ([0.0, 0.0, 0.0, 0.9], [0.02, 0.02, 0.0, 0.0], None),  # the last is not this process's
        ([0.0, 0.0, 0.0, 0.0], [1.0, 0.6, 0.0, 0.0], "other processes took 1.6 of 3 cores"),
        ([0.0, 0.8, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], "other processes took 0.8 of 3 cores"),
    ],
)
def test_other_processes_are_seen_before_and_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: list[float],
    behind: list[float],
    why: str | None,
) -> None:
    spent, clock = [10.0] * 4, [0.0]
    windows = iter([before, behind])

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        spent[:] = [s + seconds * rate for s, rate in zip(spent, next(windows), strict=True)]
        write(tmp_path, *spent)

    monkeypatch.setattr("offplan.hostmem.busy.WINDOW_S", 100.0)  # ticks are of a hundredth
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    write(tmp_path, *spent)
    with Watch(tmp_path) as watch:
        watch.note(0.1)
    assert (watch.why is None) == (why is None)
    assert (why or "") in str(watch.why)


def test_samples_that_differ_are_seen(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:  # whose kernel tells nothing
        watch.note(0.3)
        watch.note(0.1)
    assert watch.why == "measured in samples of which even half differ by 30%"


def test_own_work_is_nobodys_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", iter([0.0, 0.1, 0.1, 0.2]).__next__)
    write(tmp_path)
    with Watch(tmp_path) as watch:
        pass
    assert watch.num_busy == 0.0


def test_the_spread_of_half_the_samples() -> None:
    assert spread_of_half([1.0] * 8 + [9.0, 9.0]) == 0.0
    assert spread_of_half([1.0, 1.0, 2.0, 3.0, 3.0]) == 1.0
