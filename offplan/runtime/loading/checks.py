"""Checks of a mapping: every parameter is filled, by its own layer, in its own shape."""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.tensors import FLOATS
from offplan.errors import CheckpointError
from offplan.held.stage import Stage
from offplan.runtime.loading.skeleton import decoder_layers, has_named_layers
from offplan.runtime.loading.target import Source, Target
from offplan.runtime.refusal import refuse

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
