"""The timeline: runs the very schedule that the runtime executes, operation by operation.

Traces show what it does at each moment; ``costs.steady`` has the same times of many plans at once.

Two queues, as on the GPU: compute runs the operations in program order, and one FIFO link carries
the copies. A copy starts when everything before it in the compute queue and the copy before it are
done. A wait holds compute until its copy is done. A layer that reads weights in place first spends
their time on both queues, because kernels and DMA share the link. The kernels have nearly all of
the link while they run: copies meanwhile are late by what the kernels read. The kernels take a
little longer, at most until these copies are done. In a decode step that copies at all, the
timeline assumes that the link is busy whenever kernels read. A layer in pieces takes all but their
time when it is begun, and theirs piece by piece. Each group of chunks takes an equal share.

In a decode step every rule then takes a maximum or adds a constant, so the step is a linear map
over the max-plus semiring. In steady state it takes exactly the map's largest cycle mean: no
iteration has to settle. Times are whole picoseconds, so the result does not depend on the order of
additions.

Source: F. Baccelli et al., Synchronization and Linearity (1992), chapter 3; R. Karp, A
characterization of the minimum cycle mean in a digraph (1978).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

from offplan.backends import Backend
from offplan.placement import Span
from offplan.schedule import Begin, Compute, ComputePiece, Copy, Schedule, Wait

PS_PER_S = 10**12
"""Picoseconds in a second."""

BEFORE_ALL = float("-inf")
"""A moment before all others."""

Time = float | Fraction
"""A moment, in picoseconds."""
Queue = Literal["compute", "link", "cores"]
Doing = Literal["compute", "wait", "late", "read", "copy", "multiply"]
"""``wait`` is compute that waits for the link, ``late`` compute that waits for the host's cores.
``read`` is weights being read in place, ``multiply`` the cores' products."""
Record = Callable[[Queue, Doing, int | None, Time, Time], None]
"""Hears of each thing that a queue does: of which layer (None outside of all layers), and when it
begins and ends."""


class PieceTimes(NamedTuple):
    """The times of a layer that streams in pieces, in picoseconds."""

    moved_ps: int
    """Part of the layer's compute that its pieces take, less what launching its chunks takes longer
    than their kernels."""
    piece_ps: int
    """One piece for one group of chunks, with what launching it takes."""
    launching_ps: int
    """Picoseconds that launching takes longer than kernels, over all chunks and pieces."""
    num_groups: int
    """Groups of chunks for which the pieces cross."""


@dataclass(frozen=True)
class PassTimes:
    """The times of the operations of one pass, in whole picoseconds."""

    compute_ps: tuple[int, ...]
    """Picoseconds of each layer, all chunks, with everything resident."""
    outside_ps: int
    """After the last layer: head and whatever else lies outside the layers."""
    uva_ps: tuple[int, ...]
    """Picoseconds each layer reads weights in place, by all backends, before it computes."""
    uva_slowdown: float
    """Time of reading in a pass that copies too, as a multiple."""
    uva_bytes: int
    """Bytes read in place over all layers, re-reads included."""
    copy_ps: Callable[[Span], int]
    """One DMA."""
    read_by: Mapping[Backend, int] = field(default_factory=dict)
    """``uva_bytes`` by the backend that reads them; rows of an embedding are ``uva``'s."""
    keeping_ps: tuple[int, ...] = ()
    """Picoseconds of each layer's kernels that keep experts on the GPU; empty if none do."""

    cores_ps: tuple[int, ...] = ()
    """Picoseconds that each layer waits for the host's cores; empty if they compute nothing."""
    cores_busy_ps: tuple[int, ...] = ()
    """Picoseconds that the cores work for each layer, also while compute does not wait for them."""
    cores_bytes: int = 0
    """Bytes that the cores read, over all layers."""
    cores_products: int = 0
    """Products that are handed over to the cores."""
    missed_ps: tuple[int, ...] = ()
    """Picoseconds that each layer waits beyond reading if the cores multiply some of its missed
    experts. Negative if its other products hide both. Empty if the cores multiply none."""
    later_bytes: int = 0
    """Bytes that the link brings for later passes, over all layers."""
    later_ps: int = 0
    """Picoseconds of the link for ``later_bytes``."""
    num_calls: tuple[int, ...] = ()
    """Calls of each layer in the pass, which takes an equal part in each; empty for once."""
    pieces: Mapping[int, PieceTimes] = field(default_factory=dict)
    """Layers of a prompt that stream in pieces, by index."""

    def share_ps(self, layer: int) -> tuple[int, int]:
        """Picoseconds that one call of a layer reads weights in place, and runs its kernels.

        Of a layer in pieces it is for one group of chunks, without its pieces.
        """
        count = self.num_calls[layer] if self.num_calls else 1
        if layer in self.pieces:
            count *= self.pieces[layer].num_groups
        return self.uva_ps[layer] // count, self.begin_ps[layer] // count

    def share_cores_ps(self, layer: int) -> tuple[int, int]:
        """Picoseconds of one call of a layer that it waits for the cores, and that they work."""
        count = self.num_calls[layer] if self.num_calls else 1
        waits = [each[layer] for each in (self.cores_ps, self.missed_ps) if each]
        busy = self.cores_busy_ps[layer] if self.cores_busy_ps else 0
        return max(0, sum(waits)) // count, busy // count

    @cached_property
    def busy_ps(self) -> tuple[int, ...]:
        """Picoseconds of each layer's kernels, with those that keep experts, and of the cores."""
        every = self.compute_ps, self.keeping_ps, self.cores_ps, self.missed_ps
        return tuple(map(sum, zip_longest(*every, fillvalue=0)))

    @cached_property
    def begin_ps(self) -> tuple[int, ...]:
        """Picoseconds of each layer's kernels without those of pieces."""
        moved = {layer: piece.moved_ps for layer, piece in self.pieces.items()}
        return tuple(busy - moved.get(layer, 0) for layer, busy in enumerate(self.busy_ps))

    @property
    def resident_ps(self) -> int:
        """The whole pass with everything resident."""
        return sum(self.compute_ps) + self.outside_ps


@dataclass(frozen=True)
class PhaseTimes:
    """The times of a phase, in picoseconds; a steady step may be a fraction."""

    step_ps: Fraction
    times: PassTimes
    """Times of all passes of the phase."""
    num_copies: int
    copied_bytes: int
    copied_ps: int
    """The link's time for all copies."""
    waiting: str
    """Formula of the time that compute waits."""
    later_ps: int = 0
    """Part of ``copied_ps`` that nothing in the phase waits for."""

    @property
    def compute_ps(self) -> int:
        """The same pass with everything resident."""
        return self.times.resident_ps

    @property
    def link_ps(self) -> int:
        """Time that the link is busy."""
        return self.copied_ps + sum(self.times.uva_ps) + self.times.later_ps

    @property
    def link_bytes(self) -> int:
        """Bytes that cross the link."""
        return self.copied_bytes + self.times.uva_bytes + self.times.later_bytes

    @property
    def bound_ps(self) -> int:
        """The larger of compute and the link's time that the phase waits for."""
        return max(self.compute_ps, self.awaited_ps)

    @property
    def awaited_ps(self) -> int:
        """The link's time that the phase waits for."""
        return self.link_ps - self.later_ps - self.times.later_ps


def to_ps(seconds: float) -> int:
    """Round a time to whole picoseconds."""
    return round(seconds * PS_PER_S)


def to_seconds(picoseconds: int | Fraction) -> float:
    """Convert picoseconds to seconds."""
    return float(Fraction(picoseconds) / PS_PER_S)


WAITING = "waits in the timeline: layers in order, copies in order as slots get free"
"""Formula of compute's waiting by a schedule."""


def price_decode(schedule: Schedule, times: PassTimes) -> PhaseTimes:
    """Price a decode step in steady state, when each step is followed by another like it."""
    return add_up(schedule, times, largest_cycle_mean(map_moments(schedule, times)), WAITING)


def price_prefill(schedule: Schedule, times: PassTimes) -> PhaseTimes:
    """Price the pass that reads a prompt, from an idle link whose ring holds what it should."""
    return add_up_prompt(schedule, times, int(run_prompt(schedule, times)[0]))


def add_up_prompt(schedule: Schedule, times: PassTimes, step_ps: Fraction | int) -> PhaseTimes:
    """Add up the link's work of a prompt, which ends with its compute after ``step_ps``.

    Copies that it queues for the step after it count as link time and bytes, as they do when the
    runtime measures. They do not count in ``bound_ps``: nothing in the prompt waits for them.
    """
    later: dict[int, int] = {}
    for op in schedule.operations:
        if isinstance(op, Copy):
            later[op.slot] = times.copy_ps(op.span)
        elif isinstance(op, Wait):
            later.pop(op.slot, None)
    taken = add_up(schedule, times, step_ps, WAITING)
    return replace(taken, later_ps=sum(later.values()))


def add_up(
    schedule: Schedule,
    times: PassTimes,
    step_ps: Fraction | int,
    waiting: str,
    num_passes: int = 1,
) -> PhaseTimes:
    """Add up the link's work of a phase of equal passes that takes ``step_ps``.

    ``times`` are those of all passes, the schedule is that of one.
    """
    copies = schedule.copied_spans
    return PhaseTimes(
        step_ps=Fraction(step_ps),
        times=times,
        num_copies=num_passes * sum(len(span.runs) for span in copies),
        copied_bytes=num_passes * schedule.link_bytes,
        copied_ps=num_passes * sum(map(times.copy_ps, copies)),
        waiting=waiting,
    )


def map_moments(schedule: Schedule, times: PassTimes) -> list[list[Time]]:
    """Return a decode step as a map, column by column: what depends on each moment alone.

    The moments are those of ``run_step``.
    """
    size = 2 + len(schedule.before)
    columns = []
    for origin in range(size):
        state: list[Time] = [BEFORE_ALL] * size
        state[origin] = 0
        run_step(schedule, times, state)
        columns.append(state)
    return columns


def _ignore(*_: object) -> None:
    """Record nothing."""


def run_step(
    schedule: Schedule, times: PassTimes, state: list[Time], record: Record = _ignore
) -> None:
    """Advance ``state`` by a decode step: when compute, the link and each slot's fill are done."""
    copies = any(isinstance(op, Copy) and times.copy_ps(op.span) for op in schedule.operations)
    slowdown = times.uva_slowdown if copies else 1.0
    _run_pass(schedule, times, state, lambda reading, _: int(reading * slowdown), record)


def run_prompt(schedule: Schedule, times: PassTimes, record: Record = _ignore) -> list[Time]:
    """Run a prompt from an idle link; return when compute, link and slots are done."""
    state: list[Time] = [0] * (2 + len(schedule.before))

    def read(reading: int, left: Time) -> Time:
        return min(int(reading * times.uva_slowdown), reading + left)

    _run_pass(schedule, times, state, read, record)
    return state


def _run_pass(
    schedule: Schedule,
    times: PassTimes,
    state: list[Time],
    read: Callable[[int, Time], Time],
    record: Record,
) -> None:
    """Advance ``state``: when compute, the link and the fill of each slot are done.

    ``read`` is given what a layer reads, and what is still to be copied then. It returns the time
    that the layer's kernels take to read it.
    """
    compute, link = state[0], state[1]
    slots = state[2:]
    begun: int | None = None
    for op in schedule.operations:
        if isinstance(op, Copy):
            began = max(link, compute)
            link = slots[op.slot] = began + times.copy_ps(op.span)
            record("link", "copy", op.span.layer, began, link)
        elif isinstance(op, Wait):
            began, compute = compute, max(compute, slots[op.slot])
            record("compute", "wait", op.span.layer, began, compute)
        elif isinstance(op, ComputePiece):
            began, compute = compute, compute + times.pieces[op.layer].piece_ps
            record("compute", "compute", op.layer, began, compute)
        elif isinstance(op, Compute) and op.layer == begun:
            begun = None  # all of its own time was when it was begun
        elif isinstance(op, Begin | Compute):
            begun = op.layer if isinstance(op, Begin) else None
            reading, busy = times.share_ps(op.layer)
            late, working = times.share_cores_ps(op.layer)
            entered = compute
            if reading:
                took = read(reading, max(0, link - compute))
                record("link", "read", op.layer, compute, compute + reading)
                record("compute", "read", op.layer, compute, compute + took)
                # What is being copied meanwhile is late by as much as the kernels read.
                link = max(link, compute) + reading
                slots = [max(done, compute) + reading for done in slots]
                compute += took
            began, compute = compute, compute + busy
            record("compute", "compute", op.layer, began, compute - late)
            record("compute", "late", op.layer, compute - late, compute)
            # what the layer waits for ends with it; what it hides begins with it
            started = max(entered, compute - working) if late else entered
            record("cores", "multiply", op.layer, started, min(started + working, compute))
    record("compute", "compute", None, compute, compute + times.outside_ps)
    state[:] = [compute + times.outside_ps, link, *slots]


def largest_cycle_mean(columns: Sequence[Sequence[Time]]) -> Fraction:
    """Largest mean weight of a cycle in the graph whose edge from i to j weighs ``columns[i][j]``.

    Karp's formula is max over v of min over k of (D_n(v) - D_k(v)) / (n - k). D_k(v) is the
    heaviest walk of k edges that ends in v.
    """
    size = len(columns)
    heaviest: list[list[Time]] = [[0] * size]
    for _ in range(size):
        last = heaviest[-1]
        heaviest.append([max(last[i] + columns[i][j] for i in range(size)) for j in range(size)])
    # Every moment of a pass depends on an earlier one, so no walk is missing here.
    return max(
        min(Fraction(int(heaviest[size][v] - heaviest[k][v]), size - k) for k in range(size))
        for v in range(size)
    )
