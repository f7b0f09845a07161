"""The ordered operations of one forward pass: what the timeline prices and the runtime executes.

Operations of the compute stream are in program order. A ``Copy`` stands where its slot becomes
free. It may start once everything before it in the compute stream is done. Copies run one after
another on their own stream. ``Wait`` makes the compute stream wait for a copy, and ``Serve`` has a
backend fetch what a layer is about to read.

The ring: the layers that stream in a pass take turns. Turn t uses slot t mod K, where K is the
number of slots, or of turns where there are fewer. As soon as its layer has run, the slot is
refilled for its next user. That is turn t + K of the same pass or, after the slot's last turn,
turn t mod K of the next pass. A copy that the slot already holds is not made again, so a layer that
has a slot of its own is never copied twice. A layer that a pass calls several times has one slot
for all its calls, and takes a turn in each. If decode streams nothing, it finds in the ring what
the last turns of prefill left there. Decode copies anew what an aborted pass took from there.

Layers in pieces: all chunks first run up to what a prompt streams of a layer in pieces. Then each
piece meets the tokens of all chunks. Pieces take turns in PIECE_SLOTS slots of their own, across
layers, by the same rule. If a plan limits how many chunks wait there, the chunks do so group by
group. The pieces then take their turns again in each group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offplan.backends import Backend
from offplan.placement import PIECE_SLOTS, Phase, Placement, SlabEntry, Span


@dataclass(frozen=True)
class Copy:
    """Fill a slot from a slab, on the copy stream."""

    slot: int
    span: Span


@dataclass(frozen=True)
class Wait:
    """Make the compute stream wait until the slot holds the span."""

    slot: int
    span: Span


@dataclass(frozen=True)
class Serve:
    """Have a backend fetch what a layer is about to read, on the compute stream."""

    phase: Phase
    layer: int
    backend: Backend


@dataclass(frozen=True)
class Begin:
    """Run a group of chunks through a layer in pieces up to these.

    Whatever the layer's kernels read in place they read now. From the second group on, the chunks
    of the one before run the rest of the layer first.
    """

    layer: int
    group: int = 0


@dataclass(frozen=True)
class ComputePiece:
    """Compute with a piece of a layer for the tokens of a group of chunks."""

    layer: int
    piece: int
    group: int = 0


@dataclass(frozen=True)
class Compute:
    """Run one decoder layer, or the rest of one that was begun.

    Whatever its kernels read in place they read now, where it was not begun.
    """

    layer: int


Operation = Copy | Wait | Serve | Begin | ComputePiece | Compute

Calls = Mapping[Phase, Sequence[int]]
"""The layers in the order in which a pass of each phase calls them, by index; a layer may come
several times."""

Ring = tuple[Span | None, ...]
"""Span that each slot holds, or is being filled with; None for a slot never used."""


@dataclass(frozen=True)
class Schedule:
    """One forward pass over all layers, from the ring it finds to the ring it leaves."""

    phase: Phase
    operations: tuple[Operation, ...]
    before: Ring
    after: Ring

    @property
    def copied_spans(self) -> list[Span]:
        """Spans that its copies move, in their order."""
        return [op.span for op in self.operations if isinstance(op, Copy)]

    @property
    def link_bytes(self) -> int:
        """Bytes that its copies move."""
        return sum(span.nbytes for span in self.copied_spans)


def empty_ring(placement: Placement) -> Ring:
    """Return the ring before anything was copied."""
    return (None,) * (placement.num_slots + placement.num_piece_slots)


def slots_of(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
    """Return slot and span of every layer that streams whole in this phase, by layer index."""
    spans = placement.spans(phase)
    num_slots = min(placement.num_slots, len(spans))
    return {span.layer: (turn % num_slots, span) for turn, span in enumerate(spans)}


def piece_slots_of(placement: Placement) -> dict[int, list[tuple[int, Span]]]:
    """Return slot and span of each piece that a prompt streams, by layer index."""
    first, turn = placement.num_slots, 0
    found: dict[int, list[tuple[int, Span]]] = {}
    for layer, pieces in placement.pieces.items():
        for span in pieces:
            found.setdefault(layer, []).append((first + turn % PIECE_SLOTS, span))
            turn += 1
    return found


def turns_of(
    placement: Placement, phase: Phase, num_chunks: int = 1
) -> dict[int, list[tuple[int, Span]]]:
    """Return the turns of each layer that streams in this phase, what it streams whole first.

    A prompt has ``num_chunks`` chunks.
    """
    turns = {layer: [turn] for layer, turn in slots_of(placement, phase).items()}
    if phase is Phase.PREFILL:
        for layer, pieces in piece_slots_of(placement).items():
            again = placement.num_groups(layer, num_chunks)
            turns[layer] = turns.get(layer, []) + again * pieces
    return turns


def kept_after_prefill(placement: Placement) -> dict[int, tuple[int, Span]]:
    """Return slot and span of the layers whose slab prefill leaves in the ring, by layer index.

    If decode copies nothing, no slot is refilled after its last turn in prefill. Decode reads what
    these spans hold from their slots, and only what lies outside them over the link. Empty if
    decode streams anything, since it needs the slots.
    """
    if placement.spans(Phase.DECODE):
        return {}
    last_users = dict(slots_of(placement, Phase.PREFILL).values())
    return {span.layer: (slot, span) for slot, span in last_users.items()}


def _left_for(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
    """Return what a phase reads in the ring and does not stream, by layer index."""
    return kept_after_prefill(placement) if phase is Phase.DECODE else {}


def slots_read(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
    """Return slot and span of every layer of which this phase reads a part in the ring."""
    return slots_of(placement, phase) | _left_for(placement, phase)


def read_at_use(placement: Placement, phase: Phase) -> dict[int, list[SlabEntry]]:
    """Return what each layer reads neither from the GPU nor from the ring, by layer index.

    Decode finds in the ring what prefill streamed and left there, whatever decode's backend is.
    Experts that are cached one by one are the exception: decode reads them from their slots, or in
    place.
    """
    kept = _left_for(placement, phase)
    return {
        slab.layer: [
            entry
            for entry in slab.entries
            if not entry.backend(phase).streams
            and not (slab.layer in kept and entry.prefill.streams and entry.reads_ring(phase))
        ]
        for slab in placement.slabs
    }


def build_pass(
    placement: Placement,
    num_layers: int,
    phase: Phase,
    ring: Ring,
    next_phase: Phase,
    *,
    calls: Calls | None = None,
    num_chunks: int = 1,
    copies_again: bool = False,
    in_order: bool = False,
) -> Schedule:
    """Order the operations of one pass that is followed by a pass of ``next_phase``.

    A pass calls the layers as ``calls`` says, each once and in order where that is left out; a
    prompt does so with ``num_chunks`` chunks. With ``copies_again`` every layer that streams is
    followed by a copy, also of what its slot already holds. With ``in_order`` copies of the next
    pass's first layers, in their order, follow the last layers.
    """
    order = calls or dict.fromkeys(Phase, range(num_layers))
    turns_by_layer = turns_of(placement, phase, num_chunks)
    turns = [turn for layer in order[phase] for turn in turns_by_layer.get(layer, ())]
    following = _first_turns(placement, next_phase, order[next_phase])
    contents = list(ring)
    operations: list[Operation] = []
    served = {
        layer: [*dict.fromkeys(e.backend(phase) for e in entries if e.backend(phase).is_served)]
        for layer, entries in read_at_use(placement, phase).items()
    }

    def holds(slot: int, span: Span) -> bool:
        return contents[slot] == span

    def fill(slot: int, span: Span, *, again: bool = False) -> None:
        if again or not holds(slot, span):
            operations.append(Copy(slot, span))
            contents[slot] = span

    for slot, span in _first_turns(placement, phase, order[phase]).items():
        fill(slot, span)  # what the previous pass did not leave ready
    lost = {layer: turn for layer, turn in _left_for(placement, phase).items() if not holds(*turn)}
    for slot, span in lost.values():
        fill(slot, span)
    # of each turn the next one of its slot, found from the last turn back to the first
    later: list[int | None] = [None] * len(turns)
    upcoming: dict[int, int] = {}
    for turn in reversed(range(len(turns))):
        slot, _ = turns[turn]
        later[turn] = upcoming.get(slot)
        upcoming[slot] = turn
    left, num_slots = [*following.values()], len(upcoming)

    def refill(turn: int) -> None:
        slot, _ = turns[turn]
        if (next_turn := later[turn]) is not None:
            fill(slot, turns[next_turn][1], again=copies_again)
        elif in_order:
            if (first := turn + num_slots - len(turns)) < len(left):
                fill(slot, left[first], again=copies_again)
        elif slot in following:
            fill(slot, following[slot], again=copies_again)

    turn = 0
    for layer in order[phase]:
        whole: list[int] = []
        pieces: list[int] = []
        for _, span in turns_by_layer.get(layer, ()):
            (whole if span.piece is None else pieces).append(turn)
            turn += 1
        operations += [Wait(*turns[each]) for each in whole]
        if layer in lost:
            operations.append(Wait(*lost[layer]))
        operations += [Serve(phase, layer, backend) for backend in served.get(layer, ())]
        for number, each in enumerate(pieces):
            group, piece = divmod(number, len(placement.pieces[layer]))
            if not piece:
                operations.append(Begin(layer, group))
            operations += [Wait(*turns[each]), ComputePiece(layer, piece, group)]
            refill(each)
        operations.append(Compute(layer))
        for each in whole:
            refill(each)
    return Schedule(phase, tuple(operations), ring, tuple(contents))


def _first_turns(placement: Placement, phase: Phase, order: Sequence[int]) -> dict[int, Span]:
    """Return what each slot holds first in a pass, by slot, in the order of the calls."""
    turns = turns_of(placement, phase)
    first: dict[int, Span] = {}
    for layer in order:
        for turn in turns.get(layer, ()):
            first.setdefault(*turn)
    return first


def build_repeated_pass(
    placement: Placement,
    num_layers: int,
    phase: Phase,
    *,
    finds_first: bool = True,
    in_order: bool = False,
) -> Schedule:
    """Order a pass among passes of the same phase, by an engine that copies after each layer.

    It finds the first spans in the slots, or with ``finds_first`` false copies them too, and leaves
    them there; ``in_order`` is that of ``build_pass``. As many copies follow as layers stream,
    whatever a slot already holds.
    Source: vLLM 0.33, ``offloader.prefetch._get_next_prefetch_index``.
    """
    spans, ring = placement.spans(phase)[: placement.num_slots], [*empty_ring(placement)]
    if finds_first:
        ring[: len(spans)] = spans
    for slot, span in _left_for(placement, phase).values():
        ring[slot] = span
    return build_pass(
        placement, num_layers, phase, (*ring,), phase, copies_again=True, in_order=in_order
    )


@dataclass(frozen=True)
class RequestSchedule:
    """The passes of one request: the prompt, then decode in steady state."""

    prefill: Schedule
    """The whole prompt: every chunk goes through a layer before the next layer's slab is needed."""
    first_decode: Schedule
    decode: Schedule
    """A step that leaves the ring as it finds it."""


def build_request(
    placement: Placement,
    num_layers: int,
    ring: Ring,
    calls: Calls | None = None,
    num_chunks: int = 1,
) -> RequestSchedule:
    """Order a request that starts from ``ring``; its prompt is one pass, in however many chunks.

    ``calls`` and ``num_chunks`` are those of ``build_pass``.
    """
    build = partial(build_pass, placement, num_layers, calls=calls, num_chunks=num_chunks)
    prefill = build(Phase.PREFILL, ring, Phase.DECODE)
    first = build(Phase.DECODE, prefill.after, Phase.DECODE)
    steady = build(Phase.DECODE, first.after, Phase.DECODE)
    return RequestSchedule(prefill, first, steady)


def build_steady_request(
    placement: Placement, num_layers: int, calls: Calls | None = None, num_chunks: int = 1
) -> RequestSchedule:
    """Order a request that finds the ring as an earlier, equal request left it."""
    asked = calls, num_chunks
    first = build_request(placement, num_layers, empty_ring(placement), *asked)
    return build_request(placement, num_layers, first.decode.after, *asked)
