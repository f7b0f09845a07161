"""Times of passes of many plans at once, in arrays: the pricer of the search and of one plan.

It gives exactly what the schedules of the same plans give in ``costs.timeline``, which tests hold
it to, without building them. Every array has a row for each candidate; times are whole
picoseconds, int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, lcm

import numpy as np
from numpy.typing import NDArray

from offplan.costs.timeline import PassTimes
from offplan.held.layout import PassRules
from offplan.placement import PIECE_SLOTS, Phase, Placement

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_STEPS = 12
"""A step that takes no more than this part of int64 has an exact mean.

Walks of 6 steps are added up, and their means are counted in sixtieths, by up to 4 slots.
"""
MOST = 2**60
"""The most picoseconds (13 days) or bytes that are added up, which leaves room to add some more."""
_NEVER = -(2**60)
"""A moment before all others; the times of passes added to it stay in int64."""


@dataclass(frozen=True)
class PieceTable:
    """Layers of prompts that stream in pieces: arrays of shape [candidates, layers]."""

    num_pieces: Ints
    """0 if the layer is not in pieces."""
    piece_ps: Ints
    """Compute of each piece for a group of chunks."""
    copy_ps: Ints
    """One copy of a piece."""
    num_groups: Ints
    """Groups of chunks for which the pieces cross; 1 if the layer is not in pieces."""

    @cached_property
    def most(self) -> list[int]:
        """Pieces of each layer, at most."""
        return [int(each) for each in self.num_pieces.max(axis=0)]

    @cached_property
    def following_ps(self) -> Ints:
        """One copy of a piece of the next layer in pieces, -1 if there is none."""
        found, last = np.empty_like(self.copy_ps), np.full(len(self.copy_ps), -1, dtype=np.int64)
        for layer in reversed(range(self.copy_ps.shape[1])):
            found[:, layer] = last
            last = np.where(self.num_pieces[:, layer] > 0, self.copy_ps[:, layer], last)
        return found

    def fills(self) -> Ints:
        """Picoseconds of the copies that each layer's pieces begin a prompt with.

        They are the first PIECE_SLOTS pieces, but where an earlier prompt has left just these.
        """
        fills = np.zeros_like(self.copy_ps)
        rows = np.flatnonzero(self.num_pieces.sum(axis=1) > PIECE_SLOTS)
        first = np.argmax(self.num_pieces > 0, axis=1)[rows]
        fills[rows, first] = PIECE_SLOTS * self.copy_ps[rows, first]
        return fills


@dataclass(frozen=True)
class PassTable:
    """The times of each candidate's layers in one phase: arrays of shape [candidates, layers]."""

    compute_ps: Ints
    """Compute with everything resident."""
    read_ps: Ints
    """Reading weights in place, before the layer computes."""
    span_bytes: Ints
    """Bytes that the layer streams through the ring; 0 if it has no slot."""
    copy_ps: Ints
    """One DMA of these bytes."""
    outside_ps: Ints
    """Picoseconds behind the last layer, [candidates]."""
    prefetch_step: Ints
    """Slots that the plan asks for, [candidates]."""
    pieces: PieceTable | None = None
    """Layers in pieces, whose pieces are no longer in ``compute_ps``; None if there are none."""

    def __getitem__(self, rows: Ints) -> "PassTable":
        """Select candidates, none of whose layers is in pieces."""
        names = (field.name for field in fields(self) if field.name != "pieces")
        return PassTable(*(getattr(self, name)[rows] for name in names))

    def with_more(self, read_ps: Ints, compute_ps: Ints) -> "PassTable":
        """Return the same of layers that read and compute for so much longer."""
        times = self.read_ps + read_ps, self.compute_ps + compute_ps
        return replace(self, read_ps=times[0], compute_ps=times[1])

    def on_engine(self, engine: PassRules) -> "PassTable":
        """Return the same with the slots that an engine fills ahead."""
        return replace(self, prefetch_step=engine.slots_ahead(self.num_slots[:, 0]))

    @cached_property
    def streams(self) -> Bools:
        """True if the layer streams, [candidates, layers]."""
        return self.span_bytes > 0

    @cached_property
    def num_turns(self) -> Ints:
        """Layers that stream, [candidates, 1]."""
        return np.asarray(self.streams.sum(axis=1, keepdims=True))

    @cached_property
    def num_slots(self) -> Ints:
        """Slots that the phase uses, [candidates, 1]."""
        return np.minimum(self.prefetch_step[:, None], self.num_turns)

    @cached_property
    def turn(self) -> Ints:
        """The turn of each layer that streams, [candidates, layers]."""
        return np.cumsum(self.streams, axis=1) - 1

    @cached_property
    def slot(self) -> Ints:
        """The slot of each layer that streams, [candidates, layers]."""
        return self.turn % np.maximum(self.num_slots, 1)

    @cached_property
    def later(self) -> Ints:
        """The turn after each layer's in the same slot, [candidates, layers]."""
        return self.turn + self.num_slots

    @cached_property
    def is_last(self) -> Bools:
        """True if the layer is the last of the pass in its slot, [candidates, layers]."""
        return self.streams & (self.later >= self.num_turns)

    @cached_property
    def layer_of(self) -> Ints:
        """The layers in the order of their turns, then the others, [candidates, layers]."""
        return np.argsort(~self.streams, axis=1, kind="stable")

    def layer_at(self, turn: Ints) -> Ints:
        """Return the layers that have these turns; any layer where there is no such turn."""
        last = self.streams.shape[1] - 1
        return np.take_along_axis(self.layer_of, np.clip(turn, 0, last), axis=1)

    def copy_at(self, turn: Ints) -> Ints:
        """Return the copies of the layers that have these turns."""
        return np.take_along_axis(self.copy_ps, self.layer_at(turn), axis=1)

    @property
    def alone_ps(self) -> Ints:
        """The pass if it copied nothing, [candidates]."""
        total: Ints = self.compute_ps.sum(axis=1) + self.read_ps.sum(axis=1) + self.outside_ps
        return total


def price_plan(
    engine: PassRules | None,
    placement: Placement,
    prompt: PassTimes,
    steps: Sequence[PassTimes],
    num_passes: int,
) -> tuple[Fraction, list[Fraction]]:
    """Price the prompt of one plan, and decode steps of several sizes, in picoseconds.

    An engine reads the prompt in so many passes, and has one size of steps. Sums that int64 cannot
    hold are counted in units of so many picoseconds that it can.
    """
    by_phase = {Phase.PREFILL: [prompt], Phase.DECODE: steps}
    spans = {phase: placement.spans(phase) for phase in Phase}

    def most_of(phase: Phase, times: PassTimes) -> int:
        return (
            2 * times.resident_ps
            + sum(times.busy_ps)
            + 2 * num_passes * sum(map(times.copy_ps, spans[phase]))
            + ceil(times.uva_slowdown) * sum(times.uva_ps)
            + sum(
                2 * each.num_groups * len(pieces) * (each.piece_ps + times.copy_ps(pieces[0]))
                for layer, each in times.pieces.items()
                for pieces in [placement.pieces[layer]]
            )
        )

    most = sum(max(most_of(phase, each) for each in of) for phase, of in by_phase.items())
    unit_ps = -(-NUM_STEPS * most // MOST) or 1
    tables = []
    for phase, of in by_phase.items():
        times = of[0]
        layers = {span.layer: span for span in spans[phase]}
        streamed = [layers.get(number) for number in range(len(times.compute_ps))]
        copies = [0 if span is None else times.copy_ps(span) // unit_ps for span in streamed]
        sizes = [0 if span is None else span.nbytes for span in streamed]
        in_units = [[[ps // unit_ps for ps in row] for row in (t.begin_ps, t.uva_ps)] for t in of]
        rows = np.array(in_units, dtype=np.int64)
        tables.append(
            PassTable(
                compute_ps=rows[:, 0],
                read_ps=rows[:, 1],
                span_bytes=np.array([sizes] * len(of), dtype=np.int64),
                copy_ps=np.array([copies] * len(of), dtype=np.int64),
                outside_ps=np.array([each.outside_ps // unit_ps for each in of]),
                prefetch_step=np.array([placement.num_slots] * len(of)),
                pieces=_tabulate_pieces(placement, times, unit_ps) if times.pieces else None,
            )
        )
    passes, slowdown = np.array([num_passes]), prompt.uva_slowdown
    # steps of all sizes stream alike, and prompts meet what they stream
    if engine is None:
        prompts = prompt_ps(tables[0], tables[1][np.array([0])], slowdown)
        taken, under = step_ps(tables[1], slowdown)
    else:
        prompts, taken, under = price_passes(engine, tables[0], tables[1], slowdown, passes)
    means = (Fraction(int(ps), int(of)) for ps, of in zip(taken, under, strict=True))
    return Fraction(unit_ps * int(prompts[0])), [unit_ps * each for each in means]


def _tabulate_pieces(placement: Placement, times: PassTimes, unit_ps: int) -> PieceTable:
    """Write the table of one plan's pieces, in units of so many picoseconds."""
    columns = np.zeros((4, 1, len(times.compute_ps)), dtype=np.int64)
    columns[3] = 1
    for layer, each in times.pieces.items():
        pieces = placement.pieces[layer]
        in_units = each.piece_ps // unit_ps, times.copy_ps(pieces[0]) // unit_ps
        columns[:, 0, layer] = len(pieces), *in_units, each.num_groups
    return PieceTable(*columns)


def price_passes(
    engine: PassRules | None,
    prompt: PassTable,
    step: PassTable,
    slowdown: float,
    num_passes: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Picoseconds of prompts, of so many passes on an engine, and of decode steps.

    The latter are numerators and denominators, [candidates] each.
    """
    if engine is None:
        return prompt_ps(prompt, step, slowdown), *step_ps(step, slowdown)
    steps = engine_step_ps(engine, step)
    return engine_pass_ps(engine, prompt, num_passes), steps, np.ones_like(steps)


def prompt_ps(prompt: PassTable, step: PassTable, slowdown: float) -> Ints:
    """Time of prompts that find the ring as decode left it after an earlier, equal request.

    ``step`` are the same candidates in decode; ``slowdown`` is ``PassTimes.uva_slowdown``. Returns
    picoseconds, [candidates].
    """
    held = step.layer_at(prompt.slot)  # what the next step wants in the layer's slot, if anything
    wanted = prompt.slot < step.num_slots
    spans = np.take_along_axis(step.span_bytes, held, axis=1)
    is_held = (held == np.arange(held.shape[1])) & (spans == prompt.span_bytes)
    behind = np.where(wanted & ~is_held, np.take_along_axis(step.copy_ps, held, axis=1), -1)
    refills = np.where(
        prompt.is_last, behind, np.where(prompt.streams, prompt.copy_at(prompt.later), -1)
    )

    # decode leaves what its next step begins with; elsewhere lies what prefill itself left
    found = np.where(wanted, is_held, prompt.is_last)
    is_first = prompt.streams & (prompt.turn < prompt.num_slots)
    fills = np.where(is_first & ~found, prompt.copy_ps, 0)
    piece_fills = np.zeros_like(fills) if prompt.pieces is None else prompt.pieces.fills()
    # of a layer, what streams whole comes first
    behind_all = np.cumsum(fills + piece_fills, axis=1)
    filled = np.where(fills > 0, behind_all - piece_fills, 0)
    most = max(1, int(prompt.num_slots.max(initial=0)))
    moments = np.zeros((len(fills), 2 + most), dtype=np.int64)
    moments[:, 1] = behind_all[:, -1]
    moments[:, 2:] = np.take_along_axis(filled, prompt.layer_of[:, :most], axis=1)
    pieces_done = None
    if prompt.pieces is not None:
        each = piece_fills.max(axis=1) // PIECE_SLOTS
        begun = np.where(piece_fills > 0, behind_all - piece_fills, 0).max(axis=1)
        turns = np.arange(1, PIECE_SLOTS + 1)
        pieces_done = np.where(each[:, None] > 0, begun[:, None] + turns * each[:, None], 0)
    return _run_pass(prompt, refills, slowdown, moments, pieces_done, drains=True)[:, 0]


def engine_pass_ps(engine: PassRules, phase: PassTable, num_passes: Ints) -> Ints:
    """Time of phases on an engine, of so many passes each: as ``costs.engine_times`` has it.

    Returns picoseconds, [candidates].
    """
    total = phase.alone_ps
    rows = np.flatnonzero(phase.streams.any(axis=1))
    if not len(rows):
        return total
    phase, passes = phase[rows].on_engine(engine), num_passes[rows]
    of_one = replace(
        phase,
        compute_ps=-(-phase.compute_ps // passes[:, None]),
        read_ps=-(-phase.read_ps // passes[:, None]),
        outside_ps=np.zeros_like(passes),
    )
    first = phase.later - phase.num_turns if engine.allocates_copies else phase.slot
    following = np.where(phase.is_last, first, phase.later)
    refills = np.where(phase.streams, phase.copy_at(following), -1)
    moments = np.zeros((len(rows), 2 + int(phase.num_slots.max())), dtype=np.int64)
    ends = _run_pass(of_one, refills, 1.0, moments)
    total[rows] = passes * ends[:, :2].max(axis=1) + phase.outside_ps
    return total


def engine_step_ps(engine: PassRules, step: PassTable) -> Ints:
    """Time of decode steps on an engine: as ``costs.engine_times`` has it, [candidates]."""
    if engine.beside_percent is not None:
        return engine_pass_ps(engine, step, np.ones_like(step.outside_ps))
    step = step.on_engine(engine)
    is_first = step.streams & (step.turn < step.num_slots)
    times_copied = step.streams.astype(np.int64) + (is_first & engine.copies_first_again)
    total: Ints = step.alone_ps + (times_copied * step.copy_ps).sum(axis=1)
    return total


def step_ps(step: PassTable, slowdown: float) -> tuple[Ints, Ints]:
    """Time of decode steps in steady state: the largest cycle mean of each step's map.

    Returns numerators and denominators of picoseconds, [candidates] each.
    """
    total = step.alone_ps
    count = np.ones_like(total)
    rows = np.flatnonzero(step.num_turns > step.num_slots)  # in the others nothing is copied
    if not len(rows):
        return total, count
    size = 2 + int(step.num_slots[rows].max())
    # a row for each moment that things depend on
    step = step[np.repeat(rows, size)]
    # the slot's last turn refills it for its first one of the next step
    following = np.where(step.is_last, step.slot, step.later)
    refills = np.where(step.streams & (following != step.turn), step.copy_at(following), -1)
    origins = np.tile(np.where(np.eye(size, dtype=bool), 0, _NEVER), (len(rows), 1))
    moments = _run_pass(step, refills, slowdown, origins)
    total[rows], count[rows] = _cycle_means(moments.reshape(len(rows), size, size))
    return total, count


def _cycle_means(weights: Ints) -> tuple[Ints, int]:
    """Largest mean weights of a cycle, [candidates]: Karp's formula, and its denominator.

    ``weights`` are those of the edges from i to j, [candidates, i, j].
    """
    size = weights.shape[1]
    walks = [np.zeros(weights.shape[:2], dtype=np.int64)]
    for _ in range(size):
        walks.append((walks[-1][:, :, None] + weights).max(axis=1))
    common = lcm(*range(1, size + 1))
    means = []
    for length in range(1, size + 1):
        whole, rest = np.divmod(walks[size] - walks[size - length], length)
        means.append(common * whole + common // length * rest)
    return np.min(means, axis=0).max(axis=1), common


def _run_pass(
    times: PassTable,
    refills: Ints,
    slowdown: float,
    moments: Ints,
    pieces_done: Ints | None = None,
    *,
    drains: bool = False,
) -> Ints:
    """Advance ``moments``: when compute, the link and the fill of each slot are done.

    ``moments`` is [candidates, 2 + slots]; slots that a candidate does not have go with compute.
    ``refills`` are the copies that follow each layer into its slot, -1 for none. ``pieces_done``
    are the moments of the fill of the slots for pieces, [candidates, PIECE_SLOTS], the next one
    first.
    With ``drains``, kernels that read are slower only until nothing is left to be copied.
    """
    every = np.arange(len(moments))
    pieces = np.zeros((len(moments), 0), dtype=np.int64) if pieces_done is None else pieces_done
    now = _Moments(moments[:, 0], moments[:, 1], moments[:, 2:].copy(), pieces)
    reads_any = np.asarray(times.read_ps.any(axis=0))
    streams_any = np.asarray(times.streams.any(axis=0))
    for layer in range(refills.shape[1]):
        if streams_any[layer]:
            slot = times.slot[:, layer] % now.done.shape[1]
            filled, streams = now.done[every, slot], times.streams[:, layer]
            now.compute = np.where(streams, np.maximum(now.compute, filled), now.compute)
        read, compute = times.read_ps[:, layer], times.compute_ps[:, layer]
        if times.pieces is not None and times.pieces.most[layer]:
            _run_groups(now, times.pieces, layer, read, compute, slowdown, drains=drains)
        else:
            if reads_any[layer]:
                now.read(read, slowdown, drains=drains)
            now.compute = now.compute + compute
        if streams_any[layer]:
            refill = refills[:, layer]
            copies = refill >= 0
            now.link = np.where(copies, np.maximum(now.link, now.compute) + refill, now.link)
            now.done[every, slot] = np.where(copies, now.link, now.done[every, slot])
    compute = now.compute + times.outside_ps
    has_slot = np.arange(now.done.shape[1]) < times.num_slots
    return np.column_stack([compute, now.link, np.where(has_slot, now.done, compute[:, None])])


@dataclass
class _Moments:
    """The moments at which things are done in a pass, of many candidates."""

    compute: Ints
    link: Ints
    done: Ints
    """The fill of each slot of the ring, [candidates, slots]."""
    pieces: Ints
    """The fill of each slot for pieces, the next one first, [candidates, PIECE_SLOTS or 0]."""

    def copy(self) -> "_Moments":
        """Return the moments as they are."""
        return _Moments(self.compute, self.link, self.done.copy(), self.pieces.copy())

    def read(self, read: Ints, slowdown: float, *, drains: bool) -> None:
        """Have kernels read for so many picoseconds; 0 if they read nothing."""
        slowly = self.compute + (read * slowdown).astype(np.int64)
        # what is being copied meanwhile is late by as much as the kernels read
        reading = read > 0
        self.link = np.where(reading, np.maximum(self.link, self.compute) + read, self.link)
        for slots in (self.done, self.pieces):
            if slots.size:
                late = np.maximum(slots, self.compute[:, None]) + read[:, None]
                np.copyto(slots, late, where=reading[:, None])
        self.compute = np.where(reading & drains, np.minimum(self.link, slowly), slowly)

    def go_on(self, before: "_Moments", most: Ints, reads: Bools) -> Ints:
        """Repeat the step since ``before`` at once, where another like it adds the same to all.

        A step's effect on its moments moves as they do, so the repetition is exact. ``most`` is how
        often at most, and ``reads`` whether the step reads: it alone moves the ring's slots.
        Returns how often it was repeated, [candidates].
        """
        by = self.compute - before.compute
        alike = self.link - before.link == by
        alike &= (self.pieces - before.pieces == by[:, None]).all(1)
        alike &= ~reads | (self.done - before.done == by[:, None]).all(1)
        count = np.where(alike, np.maximum(0, most), 0)
        self.compute, self.link = self.compute + count * by, self.link + count * by
        self.pieces += (count * by)[:, None]
        self.done += np.where(reads, count * by, 0)[:, None]
        return count


def _run_groups(
    now: _Moments,
    pieces: PieceTable,
    layer: int,
    read: Ints,
    compute: Ints,
    slowdown: float,
    *,
    drains: bool,
) -> None:
    """Run a layer in pieces, whose reading and other compute each group does an equal share of."""
    left = pieces.num_groups[:, layer].copy()
    read, compute = read // left, compute // left
    while left.any():
        before, is_on = now.copy(), left > 0
        now.read(np.where(is_on, read, 0), slowdown, drains=drains)
        now.compute = now.compute + np.where(is_on, compute, 0)
        _run_pieces(now, pieces, layer, left)
        left -= is_on
        # the last group is not like those before it: its copies are the next layer's
        left -= now.go_on(before, left - 1, read > 0)


def _run_pieces(now: _Moments, pieces: PieceTable, layer: int, groups: Ints) -> None:
    """Run a layer's pieces for a group of chunks, of ``groups`` that are left; 0 runs none."""
    num_pieces = pieces.num_pieces[:, layer]
    left = np.where(groups > 0, num_pieces, 0)
    behind = np.maximum(0, groups - 1) * num_pieces
    # where each piece has a slot of its own, the next group finds it there
    stays = num_pieces <= PIECE_SLOTS
    unread = np.zeros(len(left), dtype=bool)
    while left.any():
        before = now.copy()
        is_on, is_early = left > 0, left + behind > PIECE_SLOTS
        ready = np.maximum(now.compute, now.pieces[:, 0]) + pieces.piece_ps[:, layer]
        now.compute = np.where(is_on, ready, now.compute)
        refill = np.where(is_early, pieces.copy_ps[:, layer], pieces.following_ps[:, layer])
        copies = is_on & (refill >= 0) & ~(is_early & stays)
        now.link = np.where(copies, np.maximum(now.link, now.compute) + refill, now.link)
        filled = np.where(copies, now.link, now.pieces[:, 0])
        turned = np.column_stack([now.pieces[:, 1:], filled])
        now.pieces = np.where(is_on[:, None], turned, now.pieces)
        left -= is_on
        left -= now.go_on(before, np.minimum(left, left + behind - PIECE_SLOTS), unread)
