"""Plan and stage in, a place for every unit out.

The placement knows names, bytes and offsets, and no torch: the planner prices it and the runtime
carries it out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from offplan.backends import Backend
from offplan.capabilities.drafts import Draft, why_not_placed
from offplan.capabilities.rule import WeightCache
from offplan.capabilities.table import decide_prediction
from offplan.checkpoint.tables import Table
from offplan.errors import PlanError
from offplan.held.held import hold_prediction
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.plan import Offload, Rule
from offplan.routed_experts import require_experts
from offplan.segments import describe_unmatched
from offplan.units import format_bytes

ALIGNMENT_BYTES = 256
"""Every tensor in a slab starts on such a boundary, as the CUDA allocator's own blocks would."""


Cache = TypeVar("Cache")
PIECE_SLOTS = 2
"""Slots for pieces of layers: one that is computed with while the other is filled."""


class Phase(str, Enum):
    """Prefill reads the prompt; decode makes one token a step."""

    PREFILL = "prefill"
    DECODE = "decode"


def off_gpu_bytes(num_bytes: int, prefill: Backend, decode: Backend) -> int:
    """Return the bytes of a unit that are not on the GPU outside the ring, of ``num_bytes``."""
    kept = [each.gpu_bytes(num_bytes) for each in (prefill, decode) if each.gpu_bytes is not None]
    return num_bytes - max(kept, default=0)


@dataclass(frozen=True)
class SlabEntry:
    """One unit inside a slab."""

    unit: Unit
    offset: int
    """Bytes from the start of the slab; a multiple of ALIGNMENT_BYTES."""
    prefill: Backend
    decode: Backend
    is_cached: bool = False
    """True if a part of it is in GPU memory as well, in its layer's cache."""
    num_pieces: int = 1
    """Pieces of as many bytes in which prompts stream it; 1 where they stream it whole."""

    def backend(self, phase: Phase) -> Backend:
        """How this phase reads it."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    def reads_ring(self, phase: Phase) -> bool:
        """Return True if this phase reads it whole in the ring, where the ring holds it. Decode
        steps read what is cached from its cache."""
        return self.num_pieces == 1 and (phase is Phase.PREFILL or not self.is_cached)

    @property
    def off_gpu_bytes(self) -> int:
        """Bytes of GPU memory that are free because the unit lies in a slab."""
        return off_gpu_bytes(self.unit.nbytes, self.prefill, self.decode)


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` to ``stop`` of one layer's slab, or some of them: what a copy moves."""

    layer: int
    start: int
    stop: int
    piece: int | None = None
    """The number of the layer's piece that these are; None for whole entries."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Between start and stop the runs of bytes that are left out, in order."""

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """The runs that are moved: where each starts and stops in the slab, and starts in the slot.

        Each is one DMA, to a multiple of ALIGNMENT_BYTES.
        """
        found, at = [], 0
        edges = [self.start, *(edge for gap in self.gaps for edge in gap), self.stop]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            found.append((start, stop, at))
            at = align(at + stop - start)
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link."""
        return self.stop - self.start - sum(stop - start for start, stop in self.gaps)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds it."""
        start, stop, at = self.runs[-1]
        return at + stop - start


@dataclass(frozen=True)
class Slab:
    """All offloaded parameters of one layer, in one block of the store.

    Entries are ordered so that each phase streams one contiguous range beside pieces. First comes
    what streams in pieces, then in prefill only, in both phases, in decode only, in neither.
    """

    layer: int
    entries: tuple[SlabEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the block, padding between entries included."""
        last = self.entries[-1]
        return last.offset + last.unit.nbytes

    def span(self, phase: Phase) -> Span | None:
        """The range that this phase streams whole through the ring; None if it streams none."""
        return self._spans[phase]

    @cached_property
    def _spans(self) -> Mapping[Phase, Span | None]:
        found: dict[Phase, Span | None] = {}
        for phase in Phase:
            streamed = [e for e in self.entries if e.num_pieces == 1 and e.backend(phase).streams]
            if not streamed:
                found[phase] = None
                continue
            last = streamed[-1]
            stop = last.offset + last.unit.nbytes
            found[phase] = Span(self.layer, streamed[0].offset, stop)
        return found

    @cached_property
    def pieces(self) -> tuple[Span, ...]:
        """The pieces that a prompt streams one after the other; () for none.

        A piece has an equal part of each entry, and each in a run of its own.
        """
        entries = [entry for entry in self.entries if entry.num_pieces > 1]
        if not entries:
            return ()
        found = []
        for piece in range(entries[0].num_pieces):
            sizes = [(e.offset, e.unit.nbytes // e.num_pieces) for e in entries]
            runs = [(start + piece * size, start + (piece + 1) * size) for start, size in sizes]
            gaps = tuple((left[1], right[0]) for left, right in pairwise(runs))
            found.append(Span(self.layer, runs[0][0], runs[-1][1], piece, gaps))
        return tuple(found)


@dataclass(frozen=True)
class Placement:
    """The place of every parameter of the layers. A parameter that is in no slab is resident."""

    slabs: tuple[Slab, ...]
    """The slabs in the order of the layers; layers with nothing offloaded have none."""
    num_slots: int
    """Slots in the ring: no more than there are layers to stream."""
    slot_bytes: int
    """Size of each slot: the largest span of either phase."""
    resident_bytes: int
    """Weights on the GPU outside the ring and ``weight_caches``; also those outside the layers."""
    host_tables: tuple[Table, ...] = ()
    """The tables that lie on the host and are read by row."""
    weight_caches: Mapping[int, WeightCache] = field(default_factory=dict)
    """The caches of what lies in slabs, in the order of the rules, by layer index."""
    chunks_at_once: Mapping[int, int] = field(default_factory=dict)
    """Chunks of a prompt that meet a piece while it is in its slot, by layer index. In layers in
    pieces that are left out all of them do."""

    def num_groups(self, layer: int, num_chunks: int) -> int:
        """Count the groups of chunks, one after another, for which a layer's pieces cross."""
        return -(-num_chunks // self.chunks_at_once.get(layer, num_chunks))

    @cached_property
    def pieces(self) -> Mapping[int, tuple[Span, ...]]:
        """The pieces that prompts stream, by layer index, in the order of the layers."""
        return {slab.layer: slab.pieces for slab in self.slabs if slab.pieces}

    @cached_property
    def piece_bytes(self) -> int:
        """Size of each slot for a piece: the largest piece; 0 where nothing streams in pieces."""
        return max((each.slot_bytes for of in self.pieces.values() for each in of), default=0)

    @property
    def slot_sizes(self) -> list[int]:
        """Bytes of each slot: those of the ring, then those for pieces."""
        return [self.slot_bytes] * self.num_slots + [self.piece_bytes] * self.num_piece_slots

    @property
    def num_piece_slots(self) -> int:
        """Slots for pieces, numbered after those of the ring."""
        return PIECE_SLOTS if self.pieces else 0

    @property
    def entries(self) -> Iterator[SlabEntry]:
        """The units that lie in slabs, layer by layer."""
        return (entry for slab in self.slabs for entry in slab.entries)

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of the units in slabs, without the padding between them."""
        return sum(entry.unit.nbytes for entry in self.entries)

    @cached_property
    def offloaded_bytes(self) -> int:
        """Memory of the slabs, and of the tables on the host."""
        return self.slab_bytes + self.table_bytes

    @cached_property
    def table_bytes(self) -> int:
        """Memory of the tables on the host."""
        return sum(table.nbytes for table in self.host_tables)

    @cached_property
    def slab_bytes(self) -> int:
        """Memory of the slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def caches_of(self, kind: type[Cache]) -> dict[int, Cache]:
        """Return the caches of a kind, by layer index."""
        caches = self.weight_caches.items()
        return {layer: cache for layer, cache in caches if isinstance(cache, kind)}

    @cached_property
    def cached_bytes(self) -> Mapping[str, int]:
        """GPU memory of the caches, by their names."""
        found = Counter[str]()
        for cache in self.weight_caches.values():
            found[cache.name] += cache.nbytes
        return found

    @property
    def ring_bytes(self) -> int:
        """GPU memory of the ring, and of the slots for pieces."""
        return sum(self.slot_sizes)

    def spans(self, phase: Phase) -> list[Span]:
        """The spans that the phase streams whole, in the order of the layers."""
        return self._spans[phase]

    @cached_property
    def _spans(self) -> Mapping[Phase, list[Span]]:
        return {phase: _spans(self.slabs, phase) for phase in Phase}


def _spans(slabs: Iterable[Slab], phase: Phase) -> list[Span]:
    return [span for slab in slabs if (span := slab.span(phase)) is not None]


def place(stage: Stage, offload: Offload) -> Placement:
    """Carry a plan's decision over to a stage; the first rule that takes a parameter wins.

    The stage is held as the decision says. Raises PlanError for a rule that takes nothing, for a
    segment that no parameter has, and for a rule that splits what the runtime fuses. Raises
    PlanError for one that cannot cache what it takes, and for embeddings on the host of which none
    can lie there.
    """
    assert stage.recoding == offload.recoding, "a stage is lowered as the plan says"
    rules = offload.rules
    names = stage.model.parameter_names
    for position, rule in enumerate(rules, 1):
        if (unmatched := describe_unmatched(rule.cpu_offload_params, names)) is not None:
            raise PlanError(f"rule {position} {unmatched}")
    left = [math.inf if rule.max_bytes is None else rule.max_bytes for rule in rules]
    unused = set(range(len(rules)))
    slabs: list[Slab] = []
    caches: list[dict[int, WeightCache]] = [{} for _ in rules]
    chunks_at_once: dict[int, int] = {}
    for layer, units in zip(stage.layers, stage.units, strict=True):
        chosen: list[tuple[Unit, Rule]] = []
        for unit in units:
            number = _first_rule(unit, rules, left)
            if number is not None:
                unused.discard(number)
                left[number] -= unit.nbytes
                chosen.append((unit, rules[number]))
        for position, (rule, cached) in enumerate(zip(rules, caches, strict=True), 1):
            taken = [unit for unit, taker in chosen if rule.experts_key and taker is rule]
            if not taken:
                continue
            experts = require_experts(stage, layer, position, rule, taken)
            if (at_once := rule.chunks_at_once(offload.prefill_chunk)) is not None:
                chunks_at_once[layer.index] = at_once
            if (cache := rule.make_cache(experts, len(cached))) is not None:
                cached[layer.index] = cache
        if chosen:
            slabs.append(build_slab(chosen))
    if unused:
        raise PlanError(_describe_unused(min(unused), rules[min(unused)], stage))
    streamed = [_spans(slabs, phase) for phase in Phase]
    tables = stage.tables if offload.embeddings == "host" else ()
    if offload.embeddings == "host" and not stage.model.tables:
        raise PlanError(
            "embeddings: host needs an embedding that is read by row alone; the embedding of "
            f"{stage.model.source} is tied to the head, changes its type when it is loaded, or "
            "was not found"
        )
    weights = stage.loaded_bytes - sum(table.nbytes for table in tables)
    return Placement(
        slabs=tuple(slabs),
        num_slots=min(offload.prefetch_step, max(map(len, streamed))),
        slot_bytes=max((span.nbytes for spans in streamed for span in spans), default=0),
        resident_bytes=weights - sum(e.off_gpu_bytes for slab in slabs for e in slab.entries),
        host_tables=tables,
        weight_caches={layer: of for cached in caches for layer, of in cached.items()},
        chunks_at_once=chunks_at_once,
    )


def place_prediction(stage: Stage, draft: Draft | None) -> tuple[Stage, Placement] | None:
    """Lower and place the prediction layers that drafts are made by, as their decision says.

    Returns None where ``hold_prediction`` does. Raises PlanError for experts on the host of a layer
    that has none.
    """
    layers = hold_prediction(stage, draft)
    if layers is None or draft is None:
        return None
    if (why := why_not_placed(draft, stage.model)) is not None:
        raise PlanError(why)
    key = decide_prediction, draft.experts
    if key not in layers.memo:
        # no chunk changes where weights lie
        layers.memo[key] = place(layers, decide_prediction(draft, prefill_chunk=1))
    placement: Placement = layers.memo[key]
    return layers, placement


def _first_rule(unit: Unit, rules: Sequence[Rule], left: Sequence[float]) -> int | None:
    """Find the rule that takes a unit; ``left`` are the bytes that each may still take."""
    for number, rule in enumerate(rules):
        if left[number] <= 0 or not rule.selects_layer(unit.layer):
            continue
        matched = [rule.matches(parameter.name) for parameter in unit.parameters]
        if all(matched):
            return number
        if any(matched):
            names = " and ".join(parameter.name for parameter in unit.parameters)
            raise PlanError(
                f"cpu_offload_params {list(rule.cpu_offload_params)} takes only part of {names}: "
                "the runtime fuses them into one parameter, so name all of them or none"
            )
    return None


_ORDER = ((True, False), (True, True), (False, True), (False, False))
"""True if entries of a slab stream in prefill and in decode, in the order that they lie in it."""


def build_slab(chosen: Iterable[tuple[Unit, Rule]]) -> Slab:
    """Lay out the chosen units of one layer, each with the rule that takes it."""
    # sorted() is stable: within a class the entries keep the order of their names
    ranked = sorted(chosen, key=lambda of: (of[1].num_pieces == 1, _ORDER.index(of[1].streams)))
    entries: list[SlabEntry] = []
    offset = 0
    for unit, rule in ranked:
        ways = rule.prefill, rule.decode
        entries.append(SlabEntry(unit, offset, *ways, rule.caches, rule.num_pieces))
        offset = align(offset + unit.nbytes)
    return Slab(entries[0].unit.layer, tuple(entries))


def align(num_bytes: int) -> int:
    """Round up to ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _describe_unused(number: int, rule: Rule, stage: Stage) -> str:
    num_layers = len(stage.layers)
    if rule.group_size is not None and not any(rule.selects_layer(i) for i in range(num_layers)):
        return (
            f"rule {number + 1} takes nothing: of each {rule.group_size} layers it takes the last "
            f"{rule.num_in_group}, and the model has {num_layers} layers; write a group_size of "
            f"{num_layers} at most"
        )
    what = f"group_size {rule.group_size}, num_in_group {rule.num_in_group}"
    if rule.max_bytes is not None:
        what = f"max_bytes {format_bytes(rule.max_bytes)}"
    return (
        f"rule {number + 1} takes nothing: {what} selects no layer of {num_layers} that has its "
        "segments, or an earlier rule takes them all"
    )
