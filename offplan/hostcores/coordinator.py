"""A thread that computes products whenever a stream rings for one; it calls no Python.

A kernel of a captured step is given the number of a job and two words. It writes 0 to the answer
and rings with the number. The stream waits until the answer is 1 or more: 1 for done, 2 for failed.
Experts that the kernel has listed for later are copied to the GPU behind the answer, by a thread
and on a stream of the coordinator's own: two pieces at a time, and none while it computes.
Source: FreeToken, ``gpu_sync_cuda.cpp``, for a doorbell within a captured step.
"""

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import Structure, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from offplan.errors import OffplanError, Topic
from offplan.hostcores.library import Dense, Driver, Experts, Library, Team, Words

LEAST_LIMIT_S = 1.0
"""Seconds that a job may always take before the watchdog gives it up."""
TIMES_PRICE = 10.0
"""Times of its price that a job may take."""
_TROUBLES = {
    1: "the host's cores ran out of memory for a product",
    2: "the host's cores did not answer in time: a thread that computes was stopped, or hangs",
    3: "the driver did not copy the experts that the host's cores multiplied to the GPU",
}


JobKind = IntEnum("JobKind", "NOTHING DENSE EXPERTS SLEEP", start=0)
"""The kind of product that a job computes, as ``coordinator.h`` has it."""


class Spent(NamedTuple):
    """What a coordinator has spent since it began."""

    busy_ns: int
    """Nanoseconds in which it computed."""
    queueing_ns: int
    """Nanoseconds in which it queued copies."""
    queued_bytes: int
    """Bytes of these copies."""


class _Call(Structure):
    """The argument of a host function of a stream."""

    _fields_ = (("coordinator", c_void_p), ("job", c_int64))


class Coordinator:
    """Computes jobs by a team of its own, one at a time, in the order in which they are rung for.

    Once a job has failed none is computed any more, and each is answered by a failure.
    """

    def __init__(self, library: Library, team: Team, words: int, core: int = -1) -> None:
        """Begin to listen to the Words at an address, on a core if it is said; takes the team over.

        Raises OffplanError if the system gives no thread.
        """
        self._calls, self._team, self._words = library.calls, team, words
        self._address = self._calls.offplan_coordinator(team.address, words, core)
        if not self._address:
            raise OffplanError("the system gives no thread to compute with")
        self._tasks: list[object] = []
        """Objects that jobs point to."""

    @property
    def bell(self) -> int:
        """Address of the word that a job's number is written to."""
        return self._words

    @property
    def answer(self) -> int:
        """Address of the word that is 1 or more once a job has ended."""
        return self._words + Words.answer.offset

    @property
    def host_function(self) -> int:
        """Address of a C function that rings and waits, given what ``call_of`` returns."""
        return ctypes.cast(self._calls.offplan_call, c_void_p).value or 0

    def add(self, task: Dense | Experts | None, price_s: float = 0.0) -> int:
        """Add a job, which is priced at so many seconds; returns its number.

        The task must stay as it is. Raises OffplanError if there are too many.
        """
        if task is None:
            return self._add(JobKind.NOTHING, 0, LEAST_LIMIT_S, None)
        kind = JobKind.DENSE if isinstance(task, Dense) else JobKind.EXPERTS
        address = ctypes.addressof(task)
        return self._add(kind, address, max(LEAST_LIMIT_S, TIMES_PRICE * price_s), task)

    def add_sleep(self, seconds: float, limit_s: float) -> int:
        """Add a job that sleeps, and is given up after so many seconds: for tests."""
        return self._add(JobKind.SLEEP, round(seconds * 1e3), limit_s, None)

    def _add(self, kind: JobKind, address: int, limit_s: float, task: object) -> int:
        number: int = self._calls.offplan_add_job(
            self._address, int(kind), address, round(limit_s * 1e9)
        )
        if not number:
            raise OffplanError(
                "the host's cores have more products to compute than they can tell apart: open "
                "the session again, and keep to one batch"
            )
        self._tasks.append(task)
        return number

    def call_of(self, job: int) -> int:
        """Return the address of what ``host_function`` is given to have a job computed."""
        call = _Call(self._address, job)
        self._tasks.append(call)
        return ctypes.addressof(call)

    def exchange(self, job: int) -> None:
        """Ring for a job and wait for the answer, as a stream does that has rung for nothing."""
        self._calls.offplan_exchange(self._address, job)

    def copy_by(self, driver: Driver, target: int = 0, source: int = 0) -> None:
        """Copy by a driver the experts that jobs list for later, before there are such jobs.

        First a word is copied from ``source`` to ``target``, if there is one, and each of the
        driver's functions is called once. Raises OffplanError where one fails.
        """
        self._tasks.append(driver)
        asked = self._address, ctypes.byref(driver), target, source
        if status := self._calls.offplan_copy_by(*asked):
            raise OffplanError(
                f"the driver does not copy experts to the GPU for later (error {status}; -1 is no "
                "thread): update the driver, or take `later_experts` out of the plan",
                topic=Topic.DRIVER,
            )

    def wake(self) -> None:
        """Have bells heard at once, though none rang for a while: before a stream rings again."""
        if self._address:
            self._calls.offplan_wake(self._address)

    def drain(self) -> None:
        """Wait until nothing is under way: no job, and no copy of what jobs have listed.

        Returns as well once a job or a copy has failed, which ``check`` says. No stream may ring
        meanwhile.
        """
        if self._address:
            self._calls.offplan_drain(self._address)

    def count(self) -> Spent:
        """Return what was spent so far; the coordinator is not closed."""
        return Spent(*(self._calls.offplan_counter(self._address, at) for at in range(3)))

    def check(self) -> None:
        """Raise OffplanError if a job has failed."""
        if not self._address:
            return
        if trouble := _TROUBLES.get(self._calls.offplan_trouble(self._address)):
            raise OffplanError(
                f"{trouble}. Open the session again; if it comes again, plan without the host's "
                "cores (`decode: uva`)"
            )

    def close(self) -> bool:
        """Stop listening; closing it again does nothing. No stream may wait for an answer.

        Returns False if a thread hangs, which keeps what it uses.
        """
        address, self._address = self._address, 0
        if not address:
            return True
        if self._calls.offplan_end_coordinator(address):
            self._team.close()
            return True
        _left.append((self._team, self._tasks))
        return False


_left: list[object] = []
"""Objects that hung threads may still use: they are never given back."""


def choose_cores(
    allowed: Iterable[int],
    siblings: Path = Path("/sys/devices/system/cpu"),
    nearest: Iterable[int] = (),
    num_threads: int | None = None,
    quota: float | None = None,
) -> list[int]:
    """Choose the cores to compute on, one for each thread, one a physical core.

    They are of ``nearest``, the GPU's own NUMA node, if cores of it are allowed. A physical core in
    four, at least one, is left to the loop that makes the steps. ``num_threads`` takes as many as
    it says. A container's ``quota``, in cores, counts as the number of physical cores where it is
    smaller. Raises OffplanError if there are not so many.
    """
    usable = sorted(set(allowed) & set(nearest)) or sorted(allowed)
    first_of: dict[int, int] = {}
    for core in usable:
        first_of.setdefault(min(_read_siblings(siblings, core), default=core), core)
    physical, whose = [*first_of.values()], "physical cores"
    if quota is not None and quota < len(physical):
        physical, whose = physical[: max(1, int(quota))], "cores of the container's CPU quota"
    if num_threads is None:
        left = max(1, len(physical) // 4) if len(physical) > 1 else 0
        return physical[: len(physical) - left]
    if num_threads > len(physical):
        raise OffplanError(
            f"found {len(physical)} {whose} to compute on, and {num_threads} threads are asked "
            f"for: ask for {len(physical)} at most (`host_threads`)"
        )
    return physical[:num_threads]


def _read_siblings(folder: Path, core: int) -> Sequence[int]:
    """List the hardware threads of a core's physical core; source: the kernel's cputopology."""
    try:
        text = (folder / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
        return parse_cores(text)
    except (OSError, ValueError):
        return [core]


def parse_cores(text: str) -> list[int]:
    """Read the kernel's list of cores: ``0-3,8``; raises ValueError."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
