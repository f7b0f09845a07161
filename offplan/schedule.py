"""The ordered operations of one forward pass: what the timeline prices and the runtime executes.

Operations of the compute stream are in program order. A ``Copy`` stands where its slot becomes
free: it may start once everything before it in the compute stream is done, and copies run one
after another on their own stream. ``Wait`` makes the compute stream wait for a copy.

The ring turns like this: in a phase the j-th layer that streams uses slot j mod K, and a slot is
refilled as soon as its layer has run, for whoever uses it next, in this pass or in the next one.
A layer that has a slot of its own is never copied again.
"""

from dataclasses import dataclass

from offplan.placement import Phase, Placement, Span


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
class Compute:
    """Run one decoder layer."""

    layer: int


Operation = Copy | Wait | Compute

Ring = tuple[Span | None, ...]
"""What each slot holds, or is being filled with; None for a slot never used."""


@dataclass(frozen=True)
class Schedule:
    """One forward pass over all layers, from the ring it finds to the ring it leaves."""

    phase: Phase
    operations: tuple[Operation, ...]
    before: Ring
    after: Ring

    @property
    def link_bytes(self) -> int:
        """Bytes that its copies move."""
        return sum(op.span.nbytes for op in self.operations if isinstance(op, Copy))


def empty_ring(placement: Placement) -> Ring:
    """The ring before anything was copied."""
    return (None,) * placement.num_slots


def slots_of(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
    """Slot and span of every layer that streams in this phase, by layer index.

    The j-th such layer uses slot j mod min(number of slots, number of such layers).
    """
    spans = placement.spans(phase)
    num_slots = min(placement.num_slots, len(spans))
    return {span.layer: (j % num_slots, span) for j, span in enumerate(spans)}


def kept_after_prefill(placement: Placement) -> dict[int, tuple[int, Span]]:
    """Slot and span of the layers whose slab prefill leaves in the ring, by layer index.

    Where decode copies nothing, no slot is refilled after its last use in prefill: decode reads
    what these spans hold from their slots, and only what lies outside them over the link. Empty
    where decode streams anything, since it needs the slots.
    """
    if placement.spans(Phase.DECODE):
        return {}
    last_users = dict(slots_of(placement, Phase.PREFILL).values())
    return {span.layer: (slot, span) for slot, span in last_users.items()}


def slots_read(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
    """Slot and span of every layer of which this phase reads a part in the ring, by layer index."""
    slots = slots_of(placement, phase)
    return slots | kept_after_prefill(placement) if phase is Phase.DECODE else slots


def build_pass(
    placement: Placement, num_layers: int, phase: Phase, ring: Ring, next_phase: Phase
) -> Schedule:
    """Order the operations of one pass that is followed by a pass of ``next_phase``."""
    this = slots_of(placement, phase)
    users: dict[int, list[Span]] = {}
    for slot, span in this.values():
        users.setdefault(slot, []).append(span)
    following = dict(reversed(list(slots_of(placement, next_phase).values())))

    contents = list(ring)
    operations: list[Operation] = []
    for slot, spans in users.items():  # what the previous pass did not leave ready
        if contents[slot] != spans[0]:
            operations.append(Copy(slot, spans[0]))
            contents[slot] = spans[0]
    for layer in range(num_layers):
        if layer not in this:
            operations.append(Compute(layer))
            continue
        slot, span = this[layer]
        operations += [Wait(slot, span), Compute(layer)]
        rest = users[slot][users[slot].index(span) + 1 :]
        successor = rest[0] if rest else following.get(slot)
        if successor is not None and successor != contents[slot]:
            operations.append(Copy(slot, successor))
            contents[slot] = successor
    return Schedule(phase, tuple(operations), ring, tuple(contents))


@dataclass(frozen=True)
class RequestSchedule:
    """The passes of one request: the prompt, then decode in steady state."""

    prefill: Schedule
    """The whole prompt: every chunk goes through a layer before the next layer's slab is needed."""
    first_decode: Schedule
    decode: Schedule
    """Leaves the ring as it finds it."""


def build_request(placement: Placement, num_layers: int, ring: Ring) -> RequestSchedule:
    """Order a request that starts from ``ring``; its prompt is one pass, in however many chunks."""
    prefill = build_pass(placement, num_layers, Phase.PREFILL, ring, Phase.DECODE)
    first = build_pass(placement, num_layers, Phase.DECODE, prefill.after, Phase.DECODE)
    steady = build_pass(placement, num_layers, Phase.DECODE, first.after, Phase.DECODE)
    return RequestSchedule(prefill, first, steady)
