"""Tells whether other processes keep the cores busy while figures are measured."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

from offplan.hostmem.limits import read_text

WINDOW_S = 0.1
"""Seconds for which the cores are watched before a measurement, and behind it.

Source: the kernel counts in hundredths of a second.
"""
MOST_CORES = 0.5
"""Cores that others may keep busy beside figures that are kept. Source: chosen; whoever computes
takes one, a desktop at rest less than this."""
MOST_SPREAD = 0.25
"""Spread of the middle half of the samples, up to which figures are kept.

Source: chosen; all samples together have 0.01 to 0.3 on quiet hosts of an H100 and an H200.
"""


class Watch:
    """Watches this process's cores before and behind a ``with``, in which figures are measured.

    Nothing of the process may compute at either end.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc, self._cores = proc, os.sched_getaffinity(0)
        self.num_busy = 0.0
        """Cores that others kept busy, at the busier of both ends."""
        self.spread = 0.0
        """The largest spread that was noted."""

    def __enter__(self) -> Self:
        self._count()
        return self

    def __exit__(self, *error: object) -> None:
        self._count()

    def note(self, spread: float) -> None:
        """Take notice of the spread of the middle half of a figure's samples."""
        self.spread = max(self.spread, spread)

    @property
    def why(self) -> str | None:
        """Say beside what the figures were measured, which are then not kept; None for nothing."""
        if self.num_busy > MOST_CORES:
            busy = f"{self.num_busy:.1f} of {len(self._cores)} cores"
            return f"measured while other processes took {busy}"
        if self.spread > MOST_SPREAD:
            return f"measured in samples of which even half differ by {self.spread:.0%}"
        return None

    def _count(self) -> None:
        own, began, before = time.process_time(), time.monotonic(), self._busy_s()
        time.sleep(WINDOW_S)
        busy_s, own_s = self._busy_s() - before, time.process_time() - own
        num_busy = (busy_s - own_s) / (time.monotonic() - began)
        self.num_busy = max(self.num_busy, num_busy)

    def _busy_s(self) -> float:
        """Return the seconds in which the cores were not idle, or given to another guest.

        Source: proc(5): user, nice, system, idle, iowait, irq, softirq and steal, of each core.
        """
        ticks = 0
        for line in read_text(self._proc / "stat").splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in self._cores:
                ticks += sum(map(int, numbers[:3] + numbers[5:8]))
        return ticks / os.sysconf("SC_CLK_TCK")


def spread_of_half(samples: Sequence[float]) -> float:
    """Return the relative spread of the middle half of samples, without those that took long."""
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / median if median else 0.0
