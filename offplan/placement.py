"""Plan and model in, a place for every parameter out.

The placement knows names, bytes and offsets, and no torch: the planner prices it and the runtime
carries it out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import PlanError
from offplan.forms.form import Part
from offplan.packing import pack_model
from offplan.plan import Backend, Offload, Rule
from offplan.units import format_bytes

ALIGNMENT_BYTES = 256
"""Every tensor in a slab starts on such a boundary, as the CUDA allocator's own blocks would."""

FUSED_EXPERT_PARTS = (("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections of the routed experts that are one parameter once loaded.

Source: transformers' conversion mapping (``gate_up_proj``), vLLM (``w13_weight``).
"""
FUSED_PARTS = (("q_conv1d", "k_conv1d", "v_conv1d"),)
"""Parts of a layer beside its experts that are one parameter once loaded.

Source: transformers' conversion mapping (``linear_attn.conv1d``).
"""


class Phase(str, Enum):
    """Prefill reads the prompt; decode makes one token a step."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Unit:
    """What is placed as one: a part of a parameter, or of those that the runtime fuses into one.

    All parts of a parameter have its name, so that every rule takes them together.
    """

    layer: int
    parameters: tuple[Parameter, ...]
    part: Part = Part.WEIGHT

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(parameter.part_bytes[self.part] for parameter in self.parameters)

    @property
    def tensors(self) -> list[TensorInfo]:
        """The stored tensors of this part of all its parameters."""
        return [tensor for parameter in self.parameters for tensor in parameter.of(self.part)]

    @property
    def name(self) -> str:
        """The first parameter's name, relative to the layer."""
        return self.parameters[0].name

    @property
    def is_expert(self) -> bool:
        """Whether it holds routed experts."""
        return self.parameters[0].is_expert

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first parameter's weight; of routed experts with their number."""
        shape, tensors = self.parameters[0].shape, self.parameters[0].tensors
        return (len(tensors), *shape) if self.is_expert and len(shape) == 2 else shape


@dataclass(frozen=True)
class SlabEntry:
    """One unit inside a slab."""

    unit: Unit
    offset: int
    """Bytes from the start of the slab; a multiple of ALIGNMENT_BYTES."""
    prefill: Backend
    decode: Backend

    def backend(self, phase: Phase) -> Backend:
        """How this phase reads it."""
        return self.prefill if phase is Phase.PREFILL else self.decode


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` to ``stop`` of one layer's slab: what one DMA moves."""

    layer: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link."""
        return self.stop - self.start


@dataclass(frozen=True)
class Slab:
    """All offloaded parameters of one layer, in one block of the store.

    Entries are ordered so that each phase streams one contiguous range: streamed in prefill only,
    in both phases, in decode only, in neither.
    """

    layer: int
    entries: tuple[SlabEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the block, padding between entries included."""
        last = self.entries[-1]
        return last.offset + last.unit.nbytes

    def span(self, phase: Phase) -> Span | None:
        """The range that this phase streams through the ring; None if it streams nothing."""
        streamed = [entry for entry in self.entries if entry.backend(phase) is Backend.PREFETCH]
        if not streamed:
            return None
        return Span(self.layer, streamed[0].offset, streamed[-1].offset + streamed[-1].unit.nbytes)


@dataclass(frozen=True)
class Placement:
    """Where every parameter of the layers lives. What is in no slab is resident."""

    slabs: tuple[Slab, ...]
    """The slabs in the order of the layers; layers with nothing offloaded have none."""
    num_slots: int
    """Slots in the ring: no more than there are layers to stream."""
    slot_bytes: int
    """Size of each slot: the largest span of either phase."""
    resident_bytes: int
    """Weights on the GPU outside the ring, those outside the layers included."""
    host_embedding: TensorInfo | None = None
    """The input embedding, if it lies on the host and is read by row."""

    @cached_property
    def offloaded_bytes(self) -> int:
        """Memory of the slabs, and of the input embedding if it is on the host."""
        return self.slab_bytes + (self.host_embedding.nbytes if self.host_embedding else 0)

    @cached_property
    def slab_bytes(self) -> int:
        """Memory of the slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def ring_bytes(self) -> int:
        """GPU memory of the ring."""
        return self.num_slots * self.slot_bytes

    def spans(self, phase: Phase) -> list[Span]:
        """What the phase streams, in the order of the layers."""
        return _spans(self.slabs, phase)


def _spans(slabs: Iterable[Slab], phase: Phase) -> list[Span]:
    return [span for slab in slabs if (span := slab.span(phase)) is not None]


def group_units(layer: Layer) -> tuple[Unit, ...]:
    """Split a layer into units, in the order of their names.

    What takes another type's size when it is loaded is in none, nor is what it is fused with: its
    bytes are not those that a slab would hold.
    """
    fused = {False: FUSED_PARTS, True: FUSED_EXPERT_PARTS}
    partners = {
        is_expert: {part: group for group in groups for part in group}
        for is_expert, groups in fused.items()
    }
    groups: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in layer.parameters:
        parts = parameter.name.split(".")
        key = tuple(partners[parameter.is_expert].get(part, part) for part in parts)
        groups.setdefault(key, []).append(parameter)
    return tuple(
        Unit(layer.index, tuple(parameters), part)
        for parameters in groups.values()
        if all(parameter.resized is None for parameter in parameters)
        for part in parameters[0].parts
    )


def place(model: Model, offload: Offload) -> Placement:
    """Carry a plan's decision over to the model; the first rule that takes a parameter wins.

    Raises PlanError for a rule that takes nothing, for one that splits what the runtime fuses, for
    packing that does either, and for an embedding that cannot lie on the host.
    """
    model, rules = pack_model(model, offload.packing), offload.rules
    left = [math.inf if rule.max_bytes is None else rule.max_bytes for rule in rules]
    unused = set(range(len(rules)))
    slabs: list[Slab] = []
    for layer in model.layers:
        chosen: list[tuple[Unit, Rule]] = []
        for unit in group_units(layer):
            number = _first_rule(unit, rules, left)
            if number is not None:
                unused.discard(number)
                left[number] -= unit.nbytes
                chosen.append((unit, rules[number]))
        if chosen:
            slabs.append(build_slab(chosen))
    if unused:
        raise PlanError(_describe_unused(min(unused), rules[min(unused)], model))
    streamed = [_spans(slabs, phase) for phase in Phase]
    embedding = model.input_embedding if offload.embeddings == "host" else None
    if offload.embeddings == "host" and model.whole.input_embedding is None:
        raise PlanError(
            f"embeddings: host needs an input embedding of its own; that of {model.source} is "
            "tied to the head, changes its type when it is loaded, or was not found"
        )
    weights = model.loaded_bytes - (embedding.nbytes if embedding is not None else 0)
    return Placement(
        slabs=tuple(slabs),
        num_slots=min(offload.prefetch_step, max(map(len, streamed))),
        slot_bytes=max((span.nbytes for spans in streamed for span in spans), default=0),
        resident_bytes=weights - sum(e.unit.nbytes for slab in slabs for e in slab.entries),
        host_embedding=embedding,
    )


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


_ORDER = (
    (Backend.PREFETCH, Backend.UVA),
    (Backend.PREFETCH, Backend.PREFETCH),
    (Backend.UVA, Backend.PREFETCH),
    (Backend.UVA, Backend.UVA),
)
"""How entries of a slab are reached in prefill and in decode, in the order that they lie in it."""


def build_slab(chosen: Iterable[tuple[Unit, Rule]]) -> Slab:
    """Lay out the chosen units of one layer, each with the rule that takes it."""
    # sorted() is stable: within a class the entries keep the order of their names
    ranked = sorted(chosen, key=lambda pair: _ORDER.index((pair[1].prefill, pair[1].decode)))
    entries: list[SlabEntry] = []
    offset = 0
    for unit, rule in ranked:
        entries.append(SlabEntry(unit, offset, rule.prefill, rule.decode))
        offset = align(offset + unit.nbytes)
    return Slab(entries[0].unit.layer, tuple(entries))


def align(num_bytes: int) -> int:
    """Round up to ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _describe_unused(number: int, rule: Rule, model: Model) -> str:
    segments = sorted({segment for layer in model.layers for segment in layer.segments})
    if rule.cpu_offload_params and not any(rule.matches(f"{name}.weight") for name in segments):
        return (
            f"rule {number + 1} matches nothing: no parameter of {model.source} has the segment "
            f"{list(rule.cpu_offload_params)}; its segments are {', '.join(segments)}"
        )
    what = f"group_size {rule.group_size}, num_in_group {rule.num_in_group}"
    if rule.max_bytes is not None:
        what = f"max_bytes {format_bytes(rule.max_bytes)}"
    return (
        f"rule {number + 1} takes nothing: {what} selects no layer of {len(model.layers)} that "
        "has its segments, or an earlier rule takes them all"
    )
