"""The mapping from stored tensors to parameters, and the checks before and after it is loaded."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.tensors import FLOATS, TensorInfo
from offplan.errors import CheckpointError, PlanError
from offplan.held.stage import Stage
from offplan.placement import Phase, Placement, Span
from offplan.runtime.forms.runnable import check_experts
from offplan.runtime.loading.fill import (
    Conversion,
    Gathered,
    Piece,
    Source,
    Target,
    arrange,
    gather,
    list_sources,
    map_codes,
)
from offplan.runtime.loading.skeleton import decoder_layers, has_named_layers
from offplan.runtime.memory.store import WeightStore, table_layer
from offplan.runtime.refusal import refuse
from offplan.schedule import Copy, Wait, build_request, empty_ring

State = Mapping[str, torch.Tensor]
"""A model's tensors by name, as it was built; a tie has two names and one tensor."""


def check_filled(
    stage: Stage, state: State, targets: Mapping[str, Target], unused: Sequence[Source]
) -> None:
    """Raise CheckpointError for parameters that nothing fills, and tensors with nowhere to go."""
    filled = {id(state[target.built_name(name)]) for name, target in targets.items()}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    left = [source.tensor.name for source in unused]
    if not (missing or left):
        return
    kinds = {"fills": missing, "takes": left}
    told = "; ".join(f"nothing {verb} {_name_some(each)}" for verb, each in kinds.items() if each)
    is_coded = any(not p.form.is_raw and not p.is_recoded for p in stage.parameters)
    if is_coded and any(name.endswith(".bias") for name in left):
        told += "; old AutoGPTQ stores biases of zeros, which headers do not tell from others"
    raise CheckpointError(f"{stage.model.source} does not match transformers' class for it: {told}")


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def check_layers(
    skeleton: PreTrainedModel, stage: Stage, state: State, targets: Mapping[str, Target]
) -> None:
    """Check that the checkpoint's layers are the model's, in their order, and nothing else is.

    Raises CheckpointError naming the first parameter that another layer's tensor fills.
    """
    owners = find_readers(skeleton)
    # where blocks are found by the checkpoint's layers, what is stored for none stays on the GPU
    resident = (None,) if has_named_layers(skeleton) else ()
    for name, target in targets.items():
        readers = owners.get(id(state[target.built_name(name)]), (None,))
        for piece in target.pieces:
            if piece.source.layer not in (*readers, *resident):
                raise refuse(
                    f"{stage.model.source} keeps its layers where `run` does not look ({name} is "
                    f"not of the layer that {piece.tensor.name} is stored for)"
                )


def find_readers(skeleton: PreTrainedModel) -> dict[int, list[int]]:
    """Find the layers that hold each tensor of a model in themselves, by the tensor's ``id``."""
    readers: dict[int, list[int]] = {}
    for index, layer in enumerate(decoder_layers(skeleton)):
        for value in {id(v): v for v in layer.state_dict(keep_vars=True).values()}:
            readers.setdefault(value, []).append(index)
    return readers


def list_shared(
    skeleton: PreTrainedModel, targets: Mapping[str, Target]
) -> dict[str, tuple[int, ...]]:
    """Name the parameters that several layers read, with those layers.

    Such a weight is loaded once. ``skeleton`` holds no codes yet. Raises CheckpointError for one
    that is stored as codes, or for several layers.
    """
    state, readers = skeleton.state_dict(keep_vars=True), find_readers(skeleton)
    shared: dict[int, str] = {}
    for name, target in targets.items():
        value = id(state[target.built_name(name)])
        if len(readers.get(value, ())) < 2:
            continue
        if target.codes is not None:
            raise refuse(f"{name} is shared by several layers and stored as codes")
        if value in shared:
            raise refuse(
                f"{name} is stored beside {shared[value]}, and both are one weight in "
                f"{type(skeleton).__name__}, which several layers share"
            )
        shared[value] = name
    return {name: tuple(readers[value]) for value, name in shared.items()}


def check_headers(name: str, target: Target, wanted: torch.Tensor) -> None:
    """Check stored sizes, shapes and types against the model's parameter ``wanted``.

    Raises CheckpointError naming the first tensor that does not fill its place.
    """
    found = sum(piece.tensor.num_elements for piece in target.pieces)
    if found != wanted.numel():  # first: a smaller parameter may have nothing to select
        raise CheckpointError(
            f"{name}: found {found} elements in {len(target.pieces)} stored tensors, expected "
            f"{wanted.numel()}, {list(wanted.shape)}; config.json belongs to another model, or the "
            "checkpoint is incomplete"
        )
    for piece in target.pieces:
        tensor, shape = piece.tensor, tuple(piece.select(wanted).shape)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.name} has the shape {tensor.shape}; the model wants {shape}: the "
                "config belongs to other weights"
            )
        if wanted.is_floating_point() != (tensor.dtype in FLOATS):
            raise CheckpointError(
                f"{tensor.name} is stored as {tensor.dtype}; the model wants {wanted.dtype}, "
                "which it cannot be read as: fetch a checkpoint in bf16, f16 or f32"
            )


def map_tensors(skeleton: PreTrainedModel, stage: Stage) -> dict[str, Target]:
    """Find for every parameter the stored tensors that fill it, by transformers' own mapping.

    Returns targets by parameter name; of a weight that is not stored by its values, one for each
    part. Raises CheckpointError when parameters stay unfilled, stored tensors have nowhere to go,
    or their headers say that they do not fill their places.
    """
    state = skeleton.state_dict(keep_vars=True)
    gathered, unused = gather(skeleton, list_sources(stage), state)
    targets: dict[str, Target] = {}
    for one in gathered:
        if one.parameter.form.is_raw:
            targets |= _map_values(skeleton, one, state)
        else:
            targets |= map_codes(skeleton, one)
    check_experts(skeleton, {target.codes.weight for target in targets.values() if target.codes})
    check_filled(stage, state, targets, unused)
    check_layers(skeleton, stage, state, targets)
    return targets


def _map_values(
    skeleton: PreTrainedModel, one: Gathered, state: Mapping[str, torch.Tensor]
) -> dict[str, Target]:
    """Find what stored values fill: views of a parameter, or all that a conversion makes."""
    arranged = arrange(one.converter, one.sources, [source.tensor.shape for source in one.sources])
    if arranged is not None:
        target = Target(arranged[0])
        check_headers(one.name, target, state[one.name])
        return {one.name: target}
    assert one.converter is not None
    return _map_made(Conversion(one.converter, skeleton, one.name, tuple(one.sources)), state)


def _map_made(conversion: Conversion, state: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    """Find what a conversion fills, by converting shapes alone; raises CheckpointError."""
    tensors = [source.tensor for source in conversion.sources]
    operations = ", ".join(type(o).__name__ for o in conversion.converter.operations)
    try:
        made = conversion.convert(torch.empty(t.shape, device="meta") for t in tensors)
    except Exception as error:  # whatever an operation of transformers raises
        raise refuse(
            f"{conversion.name} is stored in another form than it is used in ({operations}), and "
            f"transformers cannot convert it ({error})"
        ) from None
    for name, value in made.items():
        expected = state[name].shape if name in state else None
        if value.shape != expected:
            raise CheckpointError(
                f"{conversion.name}: {operations} of {', '.join(t.name for t in tensors[:2])} "
                f"makes {name} {list(value.shape)}; the model wants "
                f"{'no such parameter' if expected is None else list(expected)}"
            )
    return dict.fromkeys(made, Target(tuple(map(Piece, conversion.sources)), conversion))


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
