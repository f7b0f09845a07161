"""The mapping from stored tensors to the parameters of a transformers model that they fill."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import FLOATS, TensorInfo
from offplan.errors import CheckpointError
from offplan.forms.form import Form, Kind, Part, WordOrder
from offplan.forms.names import part_of
from offplan.held.stage import Stage
from offplan.runtime.forms.runnable import (
    check_experts,
    check_form,
    check_joined,
    is_transposed,
    part_shape,
)
from offplan.runtime.forms.stored import hold_stored, part_name
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.loading.staging import stored_dtype
from offplan.runtime.refusal import refuse
from offplan.runtime.transformers_private import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert,
    rename,
)


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills."""

    tensor: TensorInfo
    index: tuple[int | slice, ...] = ()
    """Selects the part, as an index of torch does; all of the parameter if left out."""
    unpacked: TensorInfo | None = None
    """The checkpoint's tensor that this one is made of, where the plan holds it packed."""

    def select(self, target: torch.Tensor) -> torch.Tensor:
        """Return the view of ``target`` that this tensor fills."""
        return target[self.index]

    @property
    def read(self) -> TensorInfo:
        """The checkpoint's tensor that is read for it."""
        return self.unpacked or self.tensor


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
class Codes:
    """What a parameter that is a part of a weight's stored form holds."""

    weight: str
    """Name of the weight that the part belongs to, in the model as it was built."""
    form: Form
    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_columns: WordOrder | None = None
    """How the checkpoint packs whole numbers by columns, of which it holds rows once loaded."""


@dataclass(frozen=True)
class Target:
    """The stored tensors that fill one parameter of the model."""

    pieces: tuple[Piece, ...]
    """Stored tensors that fill it or, with a conversion, that it is made of."""
    conversion: Conversion | None = None
    """Shared by all parameters that are made together; None when the pieces are views."""
    codes: Codes | None = None
    """What the parameter holds in place of values; None where it holds these."""


def map_tensors(skeleton: PreTrainedModel, stage: Stage) -> dict[str, Target]:
    """Find for every parameter the stored tensors that fill it, by transformers' own mapping.

    Returns targets by parameter name; of a weight that is not stored by its values, one for each
    part. Raises CheckpointError when parameters stay unfilled, stored tensors have nowhere to go,
    or their headers say that they do not fill their places.
    """
    model = stage.model
    quantisation = model.architecture.quantisation
    if quantisation is not None and not quantisation.is_known:
        # nor may values that are stored as they are be all that is multiplied
        raise refuse(
            f"{model.source} is quantised in a way ({quote(quantisation.method)}) that is not known"
        )
    state = skeleton.state_dict(keep_vars=True)
    stored = [
        (parameter, part, tensor)
        for parameter in stage.parameters
        for part in parameter.parts
        for tensor in parameter.of(part)
    ]
    unpacked = {
        tensor.name: values
        for parameter, part, _ in stored
        for tensor, values in zip(parameter.of(part), parameter.unpacked, strict=False)
    }
    coded = [p.name for p, _, _ in stored if not p.form.is_raw and not p.unpacked]
    if coded and quantisation is None:
        raise refuse(f"{model.source} stores {coded[0]} as codes that its config does not explain")
    # a weight's parts go where its values would
    names = [
        values.name
        if (values := unpacked.get(tensor.name))
        else (tensor.name if parameter.form.is_raw else part_of(tensor.name)[0])
        for parameter, _, tensor in stored
    ]
    found: dict[tuple[str, Part], _Found] = {}
    unused: list[str] = []
    renamed = rename(skeleton, names)
    for (parameter, part, tensor), (name, pattern, converter) in zip(stored, renamed, strict=True):
        if name in state:
            _check_understood(name, parameter)
            one = found.setdefault((name, part), _Found(converter, parameter, []))
            if one.parameter.form != parameter.form:
                raise refuse(
                    f"{name} joins matrices stored as {one.parameter.form.label} and "
                    f"{parameter.form.label}"
                )
            one.sources.append((tensor, pattern or ""))
        else:
            unused.append(tensor.name)
    targets: dict[str, Target] = {}
    filled: set[int] = set()  # a tie has two names and one tensor
    for (name, part), one in found.items():
        if not one.parameter.form.is_raw:
            targets |= _map_codes(name, part, one, skeleton, unpacked)
            filled.add(id(state[name]))
            continue
        arranged = _arrange(one.converter, one.sources, [t.shape for t, _ in one.sources])
        if arranged is not None:
            made = {name: Target(arranged[0])}
            _check_headers(name, made[name], state[name])
        else:
            assert one.converter is not None
            conversion = Conversion(one.converter, skeleton, name, tuple(one.sources))
            made = _convert_targets(conversion, state)
        targets |= made
        filled.update(id(state[each]) for each in made)
    check_experts(skeleton, {target.codes.weight for target in targets.values() if target.codes})
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing or unused:
        told = _describe_mismatch(model.source, missing, unused)
        if coded and any(name.endswith(".bias") for name in unused):
            told += "; old AutoGPTQ stores biases of zeros, which headers do not tell from others"
        raise CheckpointError(told)
    _check_layers(skeleton, stage, targets)
    return targets


def _check_understood(name: str, parameter: Parameter) -> None:
    """Raise CheckpointError, which lists what was found, for what is sized and not understood."""
    if parameter.form.kind is Kind.OTHER:
        parts = (parameter.of(part)[0] for part in parameter.parts)
        raise refuse(
            f"{name} is stored as what fits no known form, or not the one that its config says of "
            "each expert: " + ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in parts)
        )


class _Found(NamedTuple):
    """The stored tensors that go to one parameter, and by which converter."""

    converter: WeightConverter | None
    parameter: Parameter
    sources: list[Source]


def _map_codes(
    name: str,
    part: Part,
    found: _Found,
    skeleton: PreTrainedModel,
    unpacked: Mapping[str, TensorInfo],
) -> dict[str, Target]:
    """Find what fills a part of the weight called ``name``, whose values are not held.

    ``unpacked`` are the checkpoint's tensors that parts are made of, by the names of those.
    Raises CheckpointError for a form that is not executed, and for a weight that is not multiplied
    where it is held or that transformers turns into another one when it loads.
    """
    form, tensors = found.parameter.form, [tensor for tensor, _ in found.sources]
    path, _, attribute = name.rpartition(".")
    module = skeleton.get_submodule(path)
    check_form(name, found.parameter, module)
    shape, held = found.parameter.shape, part_shape(found.parameter, part)
    assert held is not None
    if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
        raise refuse(f"{name} joins matrices whose {part.value}s differ in type or shape")
    arranged = _arrange(found.converter, found.sources, [held] * len(tensors))
    wanted = tuple(skeleton.get_parameter(name).shape)
    if is_transposed(module):
        wanted = (*wanted[:-2], wanted[-1], wanted[-2])
    of_values = _arrange(found.converter, found.sources, [shape] * len(tensors))
    if arranged is None or of_values is None or of_values[1] != wanted:
        raise refuse(
            f"{tensors[0].name} stands for {list(shape)} in {form.kind.value}, which does not fill "
            f"{name}, {list(wanted)}, as it is stored"
        )
    pieces, whole = arranged
    pieces = tuple(replace(each, unpacked=unpacked.get(each.tensor.name)) for each in pieces)
    check_joined(name, form, wanted, shape)
    by_columns = form.word_order if form.is_by_columns else None
    if by_columns is not None:
        form = form._replace(word_order=WordOrder.COMPRESSED_TENSORS)
    codes = Codes(name, form, part, whole, stored_dtype(tensors[0]), by_columns)
    return {f"{path}.{part_name(attribute, part)}": Target(pieces, codes=codes)}


def hold_codes(skeleton: PreTrainedModel, targets: Mapping[str, Target]) -> None:
    """Have a model, on the meta device, hold the parts of weights that ``targets`` find."""
    weights: dict[str, dict[Part, Codes]] = {}
    for target in targets.values():
        if target.codes is not None:
            weights.setdefault(target.codes.weight, {})[target.codes.part] = target.codes
    for name, parts in weights.items():
        path, _, attribute = name.rpartition(".")
        values = {
            part: torch.empty(codes.shape, dtype=codes.dtype, device="meta")
            for part, codes in parts.items()
        }
        form = parts[Part.WEIGHT].form
        hold_stored(skeleton.get_submodule(path), attribute, form, values)


def _arrange(
    converter: WeightConverter | None,
    found: list[Source],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[tuple[Piece, ...], tuple[int, ...]] | None:
    """Find the view of one parameter that each stored tensor fills: stacked, concatenated or both.

    ``shapes`` are those that the tensors are taken to have. Returns the views and the parameter's
    shape, None where views will not do.
    """
    if converter is None:
        return tuple(Piece(tensor) for tensor, _ in found), shapes[-1]
    parts: dict[str, list[tuple[TensorInfo, tuple[int, ...]]]] = {}
    for (tensor, pattern), shape in zip(found, shapes, strict=True):
        parts.setdefault(pattern, []).append((tensor, shape))
    operations = [type(operation) for operation in converter.operations]
    if operations == [Concatenate]:
        one_each = len(parts) == len(found)
    elif operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
        one_each = converter.operations[0].dim == 0
    else:
        return None
    # parts of unequal size do not begin at multiples of one size
    if not one_each or len(set(shapes)) > 1:
        return None
    order = [pattern for pattern in converter.source_patterns if pattern in parts]
    is_stacked = MergeModulelist in operations
    axis = converter.operations[-1].dim - is_stacked if Concatenate in operations else None
    pieces: list[Piece] = []
    for pattern, tensors in parts.items():
        for number, (tensor, shape) in enumerate(tensors):
            index: list[int | slice] = [slice(None)] * len(shape)
            if axis is not None:
                # its dimension counts the stacked one, which the stored tensor has not
                start = order.index(pattern) * shape[axis]
                index[axis] = slice(start, start + shape[axis])
            pieces.append(Piece(tensor, (*([number] if is_stacked else []), *index)))
    whole = list(shapes[0])
    if axis is not None:
        whole[axis] *= len(parts)
    num_stacked = max(map(len, parts.values()))
    return tuple(pieces), (*([num_stacked] if is_stacked else []), *whole)


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


def _check_layers(skeleton: PreTrainedModel, stage: Stage, targets: Mapping[str, Target]) -> None:
    """Check that the checkpoint's layers are the model's, in their order, and nothing else is.

    Raises CheckpointError naming the first parameter that another layer's tensor fills.
    """
    stored = {
        tensor.name: index
        for index, layer in enumerate(stage.layers)
        for parameter in layer.parameters
        for tensor in parameter.stored
    }
    state = skeleton.state_dict(keep_vars=True)
    owners = {
        id(value): index
        for index, layer in enumerate(decoder_layers(skeleton))
        for value in layer.state_dict(keep_vars=True).values()
    }
    for name, target in targets.items():
        owner = owners.get(id(state[name if target.codes is None else target.codes.weight]))
        for piece in target.pieces:
            if stored.get(piece.tensor.name) != owner:
                raise refuse(
                    f"{stage.model.source} keeps its layers where `run` does not look ({name} is "
                    f"not of the layer that {piece.tensor.name} is stored for)"
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
