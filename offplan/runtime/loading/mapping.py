"""The mapping from stored tensors to the parameters of a transformers model that they fill."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.refusal import refuse
from offplan.runtime.transformers_private import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert,
    rename,
)

FLOATS = {"F64", "F32", "F16", "BF16"}
"""Stored types that become the model's own by rounding alone."""


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills."""

    tensor: TensorInfo
    index: tuple[int | slice, ...] = ()
    """Selects the part, as an index of torch does; all of the parameter if left out."""

    def select(self, target: torch.Tensor) -> torch.Tensor:
        """Return the view of ``target`` that this tensor fills."""
        return target[self.index]


Source = tuple[TensorInfo, str]
"""A stored tensor and the converter's pattern that it matches; empty without a converter."""


@dataclass(frozen=True)
class Conversion:
    """Operations of transformers that make parameters of stored tensors where views will not do."""

    converter: WeightConverter
    skeleton: PreTrainedModel
    name: str
    """The parameter that the tensors are renamed to; the first one where there are several."""
    sources: tuple["Source", ...]

    def convert(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the sources' values, given in their order; returns values by parameter name."""
        sources = zip((pattern for _, pattern in self.sources), tensors, strict=True)
        return convert(self.converter, self.skeleton, self.name, sources)


@dataclass(frozen=True)
class Target:
    """The stored tensors that fill one parameter of the model."""

    pieces: tuple[Piece, ...]
    """Stored tensors that fill it or, with a conversion, that it is made of."""
    conversion: Conversion | None = None
    """Shared by all parameters that are made together; None when the pieces are views."""


def map_tensors(skeleton: PreTrainedModel, model: Model) -> dict[str, Target]:
    """Find for every parameter the stored tensors that fill it, by transformers' own mapping.

    Returns targets by parameter name. Raises CheckpointError when parameters stay unfilled, stored
    tensors have nowhere to go, or their headers say that they do not fill their places.
    """
    state = skeleton.state_dict(keep_vars=True)
    found: dict[str, tuple[WeightConverter | None, list[Source]]] = {}
    unused: list[str] = []
    in_layers = [t for layer in model.layers for p in layer.parameters for t in p.tensors]
    stored = [*in_layers, *model.loaded_outside]
    renamed = rename(skeleton, (tensor.name for tensor in stored))
    for tensor, (name, pattern, converter) in zip(stored, renamed, strict=True):
        if name in state:
            found.setdefault(name, (converter, []))[1].append((tensor, pattern or ""))
        else:
            unused.append(tensor.name)
    targets: dict[str, Target] = {}
    for name, (converter, sources) in found.items():
        pieces = _find_pieces(converter, sources)
        if pieces is not None:
            targets[name] = Target(pieces)
        else:
            conversion = Conversion(converter, skeleton, name, tuple(sources))
            targets |= _convert_targets(conversion, state)
    filled = {id(state[name]) for name in targets}  # a tie has two names and one tensor
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing or unused:
        raise CheckpointError(_describe_mismatch(model.source, missing, unused))
    for name, target in targets.items():
        if target.conversion is None:
            _check_headers(name, target, state[name])
    _check_layers(skeleton, model, targets)
    return targets


def _find_pieces(
    converter: WeightConverter | None, found: list[Source]
) -> tuple[Piece, ...] | None:
    """Find the view of one parameter that each stored tensor fills: stacked, concatenated or both.

    None where views will not do.
    """
    if converter is None:
        return tuple(Piece(tensor) for tensor, _ in found)
    parts: dict[str, list[TensorInfo]] = {}
    for tensor, pattern in found:
        parts.setdefault(pattern, []).append(tensor)
    operations = [type(operation) for operation in converter.operations]
    if operations == [Concatenate]:
        one_each = len(parts) == len(found)
    elif operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
        one_each = converter.operations[0].dim == 0
    else:
        return None
    # parts of unequal size do not begin at multiples of one size
    if not one_each or len({tensor.shape for tensor, _ in found}) > 1:
        return None
    order = [pattern for pattern in converter.source_patterns if pattern in parts]
    is_stacked = MergeModulelist in operations
    pieces: list[Piece] = []
    for pattern, tensors in parts.items():
        for number, tensor in enumerate(tensors):
            index: list[int | slice] = [slice(None)] * len(tensor.shape)
            if Concatenate in operations:
                # its dimension counts the stacked one, which the stored tensor has not
                axis = converter.operations[-1].dim - is_stacked
                start = order.index(pattern) * tensor.shape[axis]
                index[axis] = slice(start, start + tensor.shape[axis])
            pieces.append(Piece(tensor, (*([number] if is_stacked else []), *index)))
    return tuple(pieces)


def _convert_targets(
    conversion: Conversion, state: Mapping[str, torch.Tensor]
) -> dict[str, Target]:
    """Find what a conversion fills, by converting shapes alone."""
    tensors = [tensor for tensor, _ in conversion.sources]
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
    return dict.fromkeys(made, Target(tuple(map(Piece, tensors)), conversion))


def _describe_mismatch(source: str, missing: list[str], unused: list[str]) -> str:
    def some(names: list[str]) -> str:
        return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")

    kinds = {"fills": missing, "takes": unused}
    told = [f"nothing {verb} {some(names)}" for verb, names in kinds.items() if names]
    return f"{source} does not match transformers' class for it: {'; '.join(told)}"


def _check_layers(skeleton: PreTrainedModel, model: Model, targets: Mapping[str, Target]) -> None:
    """Check that the checkpoint's layers are the model's, in their order, and nothing else is.

    Raises CheckpointError naming the first parameter that another layer's tensor fills.
    """
    stored = {
        tensor.name: index
        for index, layer in enumerate(model.layers)
        for parameter in layer.parameters
        for tensor in parameter.tensors
    }
    state = skeleton.state_dict(keep_vars=True)
    owners = {
        id(value): index
        for index, layer in enumerate(decoder_layers(skeleton))
        for value in layer.state_dict(keep_vars=True).values()
    }
    for name, target in targets.items():
        for piece in target.pieces:
            if stored.get(piece.tensor.name) != owners.get(id(state[name])):
                raise refuse(
                    f"{model.source} keeps its layers where `run` does not look ({name} is not of "
                    f"the layer that {piece.tensor.name} is stored for)"
                )


def _check_headers(name: str, target: Target, wanted: torch.Tensor) -> None:
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
                "config is not that of these weights"
            )
        if wanted.is_floating_point() != (tensor.dtype in FLOATS):
            raise CheckpointError(
                f"{tensor.name} is stored as {tensor.dtype}; the model wants {wanted.dtype}, "
                "which it cannot be read as: fetch a checkpoint in bf16, f16 or f32"
            )
