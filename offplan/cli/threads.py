"""How many threads compute where the CPU plays GPU: as many as other processes leave cores."""

import os
from typing import TYPE_CHECKING

from offplan.cli.output import print_note
from offplan.errors import Topic

if TYPE_CHECKING:
    import torch


def settle_threads(device: "torch.device | str") -> None:
    """Have torch compute with as many threads as there are idle cores, and note fewer than usual.

    Threads of one product wait for each other: one that has to wait for a core holds up all others.
    How long they spin meanwhile is set in ``cli.main``. A GPU's device and a number in
    OMP_NUM_THREADS are left alone.
    """
    if "cpu" not in str(device) or os.environ.get("OMP_NUM_THREADS"):
        return
    import torch

    usual = torch.get_num_threads()
    idle = find_idle_cores()
    if idle < usual:
        torch.set_num_threads(idle)
        print_note(
            f"other processes are busy on this machine's {count_cores()} cores: computing with "
            f"{idle} of {usual} threads, and times may be longer than predicted (OMP_NUM_THREADS "
            "sets another number)",
            Topic.SLOW,
        )


def find_idle_cores() -> int:
    """Return the cores that the last minute's load leaves, 1 at least."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # not on Windows
        return count_cores()
    return max(1, count_cores() - round(load))


def count_cores() -> int:
    """Return the cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1
