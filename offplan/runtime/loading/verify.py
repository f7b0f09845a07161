"""Checks after loading: every parameter reads the very bytes that the plan says it reads."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import PlanError
from offplan.placement import Phase, Placement, Span
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.loading.target import Target
from offplan.runtime.memory.store import WeightStore, table_layer
from offplan.schedule import Copy, Wait, build_request, empty_ring


class Place(NamedTuple):
    """A run of bytes in one block of memory."""

    what: str
    """The block's name, in words."""
    start: int
    """Address of its first byte."""
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.start:#x} ({self.what})"


def verify_places(
    module: PreTrainedModel, phase: Phase, targets: Mapping[str, Target], store: WeightStore
) -> None:
    """Compare each parameter's address, type and size in ``phase`` with the store's placement.

    A streamed one must lie in the slot that the schedule's own operations fill for its layer, one
    that is fetched at use where its server fetches it, one read in place in its slab, a
    table that the plan has on the host in memory of its own, any other in the arena. Raises
    PlanError for the first that does not.
    """
    found = _find_values(module)
    slots = _slots_filled(store.placement, len(decoder_layers(module)), phase)
    expected = _expected_places(slots, store, phase)
    arena = Place("the resident weights", store.arena.data_ptr(), store.arena.nbytes)
    for name, target in targets.items():
        value = found[name]
        place = Place(f"{value.dtype} on {value.device}", value.data_ptr(), value.nbytes)
        wanted = expected.get(target.pieces[0].tensor)
        if wanted is None:
            stop = arena.start + arena.nbytes
            if not arena.start <= place.start <= place.start + place.nbytes <= stop:
                raise PlanError(f"{name}: found {place}, expected it within {arena}")
        elif (place.start, place.nbytes) != (wanted.start, wanted.nbytes):
            raise PlanError(f"{name}: found {place}, expected {wanted} for {phase.value}")
        elif value.device != store.arena.device:  # unlike store.device it always has an index
            raise PlanError(f"{name}: found on {value.device}, expected {store.arena.device}")


def _slots_filled(
    placement: Placement, num_layers: int, phase: Phase
) -> dict[int, tuple[int, Span]]:
    """Find the slot and span that hold what a layer streams whole, by layer index.

    Found by following a pass's operations, not by asking what the store asked. A pass that waits
    for nothing reads what the ring holds all the while; in others only what was waited for is safe.
    """
    request = build_request(placement, num_layers, empty_ring(placement))
    schedule = request.prefill if phase is Phase.PREFILL else request.decode
    ring = dict(enumerate(schedule.before))
    waited: dict[int, tuple[int, Span]] = {}
    for op in schedule.operations:
        if isinstance(op, Copy):
            ring[op.slot] = op.span
        elif isinstance(op, Wait) and ring[op.slot] == op.span and op.span.piece is None:
            waited[op.span.layer] = (op.slot, op.span)
    if waited:
        return waited
    left = ((slot, span) for slot, span in ring.items() if span is not None and span.piece is None)
    return {span.layer: (slot, span) for slot, span in left}


def _expected_places(
    slots: Mapping[int, tuple[int, Span]], store: WeightStore, phase: Phase
) -> dict[TensorInfo, Place]:
    """Find where each stored tensor that is not resident is read; of fused ones, the whole."""
    places: dict[TensorInfo, Place] = {}
    for slab in store.placement.slabs:
        slot, span = slots.get(slab.layer, (0, Span(slab.layer, 0, 0)))
        for entry in slab.entries:
            if entry.reads_ring(phase) and span.start <= entry.offset < span.stop:
                what, start = f"slot {slot}", store.slots[slot].data_ptr() - span.start
            elif (backend := entry.backend(phase)).is_served:
                fetched = store.fetched[phase, slab.layer, entry.offset]
                what, start = f"what {backend.name} fetches", fetched.data_ptr() - entry.offset
            else:
                what, start = f"the slab of layer {slab.layer}", store.slabs[slab.layer].data_ptr()
            place = Place(what, start + entry.offset, entry.unit.nbytes)
            places |= dict.fromkeys(entry.unit.tensors, place)
    for number, table in enumerate(store.placement.host_tables):
        what, start = f"{table.name}'s host memory", store.slabs[table_layer(number)].data_ptr()
        places |= dict.fromkeys(table.tensors, Place(what, start, table.nbytes))
    return places


def _find_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Find every parameter and buffer by each of its names; none may be without memory."""
    parameters = module.named_parameters(remove_duplicate=False)
    values = dict([*parameters, *module.named_buffers(remove_duplicate=False)])
    empty = next((name for name, value in values.items() if value.is_meta), None)
    if empty is not None:
        raise PlanError(f"{empty} has no weights after loading")
    return values
