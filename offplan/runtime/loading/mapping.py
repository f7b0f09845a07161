"""The mapping from stored tensors to the parameters of a transformers model that they fill."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError
from offplan.runtime.transformers_private import (
    Concatenate,
    MergeModulelist,
    Renaming,
    WeightConverter,
    convert,
)


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills."""

    tensor: TensorInfo
    index: int | None = None
    """Position along dimension 0 when several tensors are stacked; None when not."""
    axis: int | None = None
    """Dimension along which parts are concatenated; None when there is one part."""
    part: int = 0
    num_parts: int = 1

    def select(self, target: torch.Tensor) -> torch.Tensor:
        """Return the view of ``target`` that this tensor fills."""
        view = target if self.index is None else target[self.index]
        if self.axis is None:
            return view
        # the axis counts the stacked dimension, which `index` removed
        axis = self.axis - (self.index is not None)
        size = view.shape[axis] // self.num_parts
        return view.narrow(axis, self.part * size, size)


@dataclass(frozen=True)
class Conversion:
    """Operations of transformers that make parameters of stored tensors where views will not do."""

    converter: WeightConverter
    skeleton: PreTrainedModel
    name: str
    """The parameter that the tensors are renamed to; the first one where there are several."""
    sources: tuple[tuple[str, TensorInfo], ...]
    """The converter's pattern that each stored tensor matches, and the tensor."""

    def convert(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the sources' values, given in their order; returns values by parameter name."""
        patterns = (pattern for pattern, _ in self.sources)
        sources = zip(patterns, tensors, strict=True)
        return convert(self.converter, self.skeleton, self.name, sources)


@dataclass(frozen=True)
class Target:
    """One parameter of the model and the stored tensors that fill it."""

    name: str
    pieces: tuple[Piece, ...]
    """Stored tensors that fill it or, with a conversion, that it is made of."""
    conversion: Conversion | None = None
    """Shared by all parameters that are made together; None when the pieces are views."""


def map_tensors(skeleton: PreTrainedModel, model: Model) -> dict[str, Target]:
    """Find for every parameter the stored tensors that fill it, by transformers' own mapping.

    Returns targets by parameter name. Raises CheckpointError when parameters stay unfilled or
    stored tensors have nowhere to go.
    """
    renaming = Renaming(skeleton)
    state = skeleton.state_dict()

    sources: dict[str, list[tuple[TensorInfo, str | None]]] = {}
    unused: list[str] = []
    for tensor in _loaded_tensors(model):
        name, pattern = renaming.find(tensor.name)
        if name in state:
            sources.setdefault(name, []).append((tensor, pattern))
        else:
            unused.append(tensor.name)
    targets: dict[str, Target] = {}
    for name, found in sources.items():
        converter = renaming.converter(found[0][1])
        if converter is None or _makes_views(converter, found):
            targets[name] = _make_target(name, found, converter)
        else:
            conversion = Conversion(
                converter, skeleton, name, tuple((p or "", tensor) for tensor, p in found)
            )
            targets |= _convert_targets(conversion, state)
    tied = _tied_names(skeleton)
    missing = [name for name in state if name not in targets and not tied[name] & targets.keys()]
    if missing or unused:
        raise CheckpointError(_describe_mismatch(model.source, missing, unused))
    return targets


def _loaded_tensors(model: Model) -> Iterator[TensorInfo]:
    for layer in model.layers:
        for parameter in layer.parameters:
            yield from parameter.tensors
    yield from model.loaded_outside


def _tied_names(skeleton: PreTrainedModel) -> dict[str, set[str]]:
    """Find the names that share a tensor, for every entry of the state, itself included."""
    names: dict[int, set[str]] = {}
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), set()).add(name)
    return {name: group for group in names.values() for name in group}


def _makes_views(converter: WeightConverter, found: list[tuple[TensorInfo, str | None]]) -> bool:
    """Whether each stored tensor fills a view of one parameter: stacked, concatenated or both."""
    operations = [type(operation) for operation in converter.operations]
    if operations == [Concatenate]:
        one_each = len({pattern for _, pattern in found}) == len(found)
    elif operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
        one_each = converter.operations[0].dim == 0
    else:
        return False
    # parts of unequal size are not where Piece.select looks for them
    return one_each and len({tensor.shape for tensor, _ in found}) == 1


def _convert_targets(
    conversion: Conversion, state: Mapping[str, torch.Tensor]
) -> dict[str, Target]:
    """Find what a conversion fills, by converting shapes alone."""
    tensors = [tensor for _, tensor in conversion.sources]
    operations = ", ".join(type(o).__name__ for o in conversion.converter.operations)
    try:
        made = conversion.convert(torch.empty(t.shape, device="meta") for t in tensors)
    except Exception as error:  # whatever an operation of transformers raises
        raise CheckpointError(
            f"{conversion.name} is stored in another form than it is used in ({operations}), and "
            f"transformers cannot convert it: {error}. The plan can still be made and exported"
        ) from None
    for name, value in made.items():
        expected = state[name].shape if name in state else None
        if value.shape != expected:
            raise CheckpointError(
                f"{conversion.name}: {operations} of {', '.join(t.name for t in tensors[:2])} "
                f"makes {name} {list(value.shape)}; the model wants "
                f"{'no such parameter' if expected is None else list(expected)}"
            )
    pieces = tuple(Piece(tensor) for tensor in tensors)
    return {name: Target(name, pieces, conversion) for name in made}


def _make_target(
    name: str, found: list[tuple[TensorInfo, str | None]], converter: WeightConverter | None
) -> Target:
    if converter is None:
        return Target(name, tuple(Piece(tensor) for tensor, _ in found))
    operations = [type(operation) for operation in converter.operations]
    stacked = operations[0] is MergeModulelist
    parts: dict[str, list[TensorInfo]] = {}
    for tensor, source_pattern in found:
        parts.setdefault(source_pattern or "", []).append(tensor)
    joined = operations[-1] is Concatenate
    order = [p for p in converter.source_patterns if p in parts]
    pieces = [
        Piece(
            tensor,
            index=index if stacked else None,
            axis=converter.operations[-1].dim if joined else None,
            part=order.index(source_pattern),
            num_parts=len(order),
        )
        for source_pattern, tensors in parts.items()
        for index, tensor in enumerate(tensors)
    ]
    return Target(name, tuple(pieces))


def _describe_mismatch(source: str, missing: list[str], unused: list[str]) -> str:
    def some(names: list[str]) -> str:
        return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")

    told = []
    if missing:
        told.append(f"nothing fills {some(missing)}")
    if unused:
        told.append(f"nothing takes {some(unused)}")
    return f"{source} does not match transformers' class for it: {'; '.join(told)}"
