"""Sources of a parameter of the model: stored tensors, and the part that each of them fills."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.group import part_of
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.quantise import describe_unread
from offplan.checkpoint.tensors import TensorInfo
from offplan.forms.form import Component, Form, Kind, WordOrder
from offplan.forms.recognise import FEW_BITS
from offplan.held.stage import Stage
from offplan.runtime.forms.runnable import (
    check_form,
    check_joined,
    check_module,
    is_transposed,
    part_shape,
)
from offplan.runtime.forms.stored import component_name, hold_stored
from offplan.runtime.loading.skeleton import model_name
from offplan.runtime.loading.staging import stored_dtype
from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    convert,
    rename,
)


class Source(NamedTuple):
    """A tensor that a GPU holds, and all that is known of it before the model is."""

    tensor: TensorInfo
    parameter: Parameter
    """The checkpoint's parameter that the tensor is of."""
    part: Component
    layer: int | None
    """Index of the layer that it is stored for; None outside the layers."""
    made_of: TensorInfo | None
    """The checkpoint's tensor that this one is made of, where the plan holds it in another form."""
    pattern: str = ""
    """The converter's pattern that it matches; empty without a converter."""

    @property
    def stores_codes(self) -> bool:
        """True if the checkpoint itself has something else than the weight's values."""
        return not self.parameter.form.is_raw and self.made_of is None

    @property
    def name_of_values(self) -> str:
        """The name under which the checkpoint would store the values that it is made for."""
        if self.made_of is not None:
            return self.made_of.name
        return part_of(self.tensor.name)[0] if self.stores_codes else self.tensor.name


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a parameter that it fills."""

    source: Source
    index: tuple[int | slice, ...] = ()
    """Selects the part, as an index of torch does; all of the parameter if left out."""

    def select(self, target: torch.Tensor) -> torch.Tensor:
        """Return the view of ``target`` that this tensor fills."""
        return target[self.index]

    @property
    def tensor(self) -> TensorInfo:
        """The tensor that is held."""
        return self.source.tensor

    @property
    def read(self) -> TensorInfo:
        """The checkpoint's tensor that is read for it."""
        return self.source.made_of or self.source.tensor


@dataclass(frozen=True)
class Conversion:
    """Operations of transformers that make parameters of stored tensors where views will not do."""

    converter: WeightConverter
    skeleton: PreTrainedModel
    name: str
    """The parameter that the tensors are renamed to; the first one where there are several."""
    sources: tuple[Source, ...]

    def convert(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the sources' values, given in their order; returns values by parameter name."""
        sources = zip((source.pattern for source in self.sources), tensors, strict=True)
        return convert(self.converter, self.skeleton, self.name, sources)


@dataclass(frozen=True)
class Codes:
    """The content of a parameter that is a part of a weight's stored form."""

    weight: str
    """Name of the weight that the part belongs to, in the model as it was built."""
    form: Form
    """Form in which it is held once loaded: in rows what the checkpoint stores by columns."""
    part: Component
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Target:
    """The stored tensors that fill one parameter of the model."""

    pieces: tuple[Piece, ...]
    """Stored tensors that fill it or, with a conversion, that it is made of."""
    conversion: Conversion | None = None
    """Shared by all parameters that are made together; None when the pieces are views."""
    codes: Codes | None = None
    """Codes that the parameter holds in place of values; None if it holds values."""

    @property
    def is_recoded(self) -> bool:
        """True if the plan, and not the checkpoint, chose the form."""
        return self.pieces[0].source.made_of is not None

    @property
    def stored_form(self) -> Form:
        """How the checkpoint stores the weight, or the plan has it packed."""
        return self.pieces[0].source.parameter.form

    def built_name(self, name: str) -> str:
        """Return the name that the parameter called ``name`` had when the model was built."""
        return name if self.codes is None else self.codes.weight


Renamed = tuple[str, str | None, WeightConverter | None]
"""A parameter's name, the converter's pattern that a stored tensor's name has, and that."""


@dataclass(frozen=True)
class Gathered:
    """The sources of one part of one parameter, and what transformers converts them by."""

    name: str
    """The parameter's name in the model as it was built."""
    converter: WeightConverter | None
    """Converter of the tensors; None if they are renamed and no more."""
    sources: list[Source] = field(default_factory=list)

    @property
    def parameter(self) -> Parameter:
        """The first parameter of the checkpoint that goes there; the others have its form."""
        return self.sources[0].parameter

    @property
    def part(self) -> Component:
        """The part that all sources are."""
        return self.sources[0].part


def list_sources(stage: Stage) -> list[Source]:
    """List what a stage holds of a text's model, part by part.

    Raises CheckpointError for codes that the config does not explain.
    """
    quantisation, source = stage.model.architecture.quantisation, stage.model.source
    if quantisation is not None and not quantisation.is_known:
        # nor may values that are stored as they are be all that is multiplied
        raise refuse(f"{source}: {describe_unread(quantisation)}")
    sources = [*_walk(stage)]
    coded = next((each.parameter for each in sources if each.stores_codes), None)
    if coded is not None and quantisation is None:
        raise refuse(f"{source} stores {coded.name} as codes that its config does not explain")
    return sources


def _walk(stage: Stage) -> Iterator[Source]:
    layers = {
        id(parameter): index
        for index, layer in enumerate(stage.layers)
        for parameter in layer.parameters
    }
    for parameter in stage.parameters:
        for part in parameter.components:
            tensors = parameter.of(part)
            of_values = parameter.made_of or [None] * len(tensors)
            for tensor, value in zip(tensors, of_values, strict=True):
                yield Source(tensor, parameter, part, layers.get(id(parameter)), value)


def gather(
    skeleton: PreTrainedModel, sources: Sequence[Source], state: Container[str]
) -> tuple[list[Gathered], list[Source]]:
    """Gather sources by the parameter, of those in ``state``, that they go to.

    A weight's parts go where its values would. Returns also the sources that go nowhere. Raises
    CheckpointError for forms that are not understood, and for matrices of several forms in one.
    """
    gathered: dict[tuple[str, Component], Gathered] = {}
    unused: list[Source] = []
    for source, (name, pattern, converter) in zip(sources, _rename(skeleton, sources), strict=True):
        if name not in state:
            unused.append(source)
            continue
        _check_understood(name, source.parameter)
        one = gathered.setdefault((name, source.part), Gathered(name, converter))
        one.sources.append(source._replace(pattern=pattern or ""))
        if one.parameter.form != source.parameter.form:
            raise refuse(
                f"{name} joins matrices stored as {one.parameter.form.label} and "
                f"{source.parameter.form.label}"
            )
    return [*gathered.values()], unused


def _rename(skeleton: PreTrainedModel, sources: Sequence[Source]) -> Iterator[Renamed]:
    """Yield where each source goes: of the experts of one parameter, where the first and last do.

    An expert's name differs from another's by its index alone. transformers takes up to 0.1 ms for
    one, which is seconds for 60 layers of 256 experts.
    """
    alike = [[*each] for _, each in groupby(sources, lambda each: (id(each.parameter), each.part))]
    named = partial(_name_in_model, skeleton)
    ends = [(named(each[0]), named(each[-1])) for each in alike]
    renamed = rename(skeleton, [name for pair in ends for name in pair])
    for group, (first, last) in zip(alike, zip(renamed, renamed, strict=True), strict=True):
        if first == last:
            yield from repeat(first, len(group))
        else:
            yield from rename(skeleton, [named(each) for each in group])


def _name_in_model(skeleton: PreTrainedModel, source: Source) -> str:
    return model_name(skeleton, source.name_of_values)


def _check_understood(name: str, parameter: Parameter) -> None:
    """Raise CheckpointError, which lists what was found, for what is sized and not understood."""
    if parameter.form.kind is Kind.OTHER:
        codes, *beside = (parameter.of(part)[0] for part in parameter.components)
        found = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (codes, *beside))
        what = "what fits no known form, or not the one that its config says"
        bits = 8 * codes.nbytes // max(1, prod(parameter.shape))
        if codes.dtype == "I32" and bits in FEW_BITS:
            what = f"whole numbers of {bits} bits, and kernels are for 4 and 8"
        raise refuse(f"{name} is stored as {what}: {found}")


Shape = tuple[int, ...]


def arrange(
    converter: WeightConverter | None, sources: Sequence[Source], shapes: Sequence[Shape]
) -> tuple[tuple[Piece, ...], Shape] | None:
    """Find the view of one parameter that each source fills.

    ``shapes`` are the shapes that are assumed of the sources. Returns the views and the parameter's
    shape, None if views will not do.
    """
    if converter is None or _is_turned_as_read(converter, sources):
        return tuple(map(Piece, sources)), shapes[-1]
    by_pattern: dict[str, list[Source]] = {}
    for source in sources:
        by_pattern.setdefault(source.pattern, []).append(source)
    # parts of unequal size do not begin at multiples of one size
    if len(set(shapes)) > 1 or not _makes_views(converter, len(by_pattern) == len(sources)):
        return None
    shape, operations = shapes[0], [type(operation) for operation in converter.operations]
    is_stacked = MergeModulelist in operations
    # its dimension counts the stacked one, which the stored tensor has not
    axis = converter.operations[-1].dim - is_stacked if Concatenate in operations else None
    order = [pattern for pattern in converter.source_patterns if pattern in by_pattern]
    pieces = tuple(
        Piece(source, (number, *index) if is_stacked else index)
        for pattern, stack in by_pattern.items()
        for index in [_index(shape, axis, order.index(pattern))]
        for number, source in enumerate(stack)
    )
    whole = list(shape)
    if axis is not None:
        whole[axis] *= len(by_pattern)
    num_stacked = max(map(len, by_pattern.values()))
    return pieces, (*([num_stacked] if is_stacked else []), *whole)


def _is_turned_as_read(converter: WeightConverter, sources: Iterable[Source]) -> bool:
    """Return True if a converter turns round what lies otherwise, and that is recoded as read."""
    operation, *others = converter.operations
    turns = isinstance(operation, Transpose) and operation.check_dims and not others
    return turns and all(source.made_of is not None for source in sources)


def _makes_views(converter: WeightConverter, is_one_each: bool) -> bool:
    """Return True if a converter only stacks and joins; ``is_one_each``: a tensor a pattern."""
    operations = [type(operation) for operation in converter.operations]
    if operations == [Concatenate]:
        return is_one_each
    if operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return bool(converter.operations[0].dim == 0)
    return False


def _index(shape: Shape, axis: int | None, place: int) -> tuple[slice, ...]:
    """Select the tensor at this place along ``axis``."""
    index = [slice(None)] * len(shape)
    if axis is not None:
        start = place * shape[axis]
        index[axis] = slice(start, start + shape[axis])
    return tuple(index)


def map_codes(skeleton: PreTrainedModel, one: Gathered) -> dict[str, Target]:
    """Find what fills a part of a weight whose values are not held.

    Raises CheckpointError for a form that is not executed, and for a weight that is not multiplied
    where it is held. Raises CheckpointError for a weight that transformers turns into another one
    when it loads.
    """
    name, parameter, part, count = one.name, one.parameter, one.part, len(one.sources)
    form, shape = parameter.form, parameter.shape
    path, _, attribute = name.rpartition(".")
    check_form(name, parameter, skeleton.get_submodule(path))
    held = part_shape(parameter, part)
    assert held is not None
    if len({(source.tensor.dtype, source.tensor.shape) for source in one.sources}) > 1:
        raise refuse(f"{name} joins matrices whose {part.value}s differ in type or shape")
    first, wanted = one.sources[0].tensor, _shape_of_values(skeleton, name)
    arranged = arrange(one.converter, one.sources, [held] * count)
    of_values = arrange(one.converter, one.sources, [shape] * count)
    if arranged is None or of_values is None or of_values[1] != wanted:
        raise refuse(
            f"{first.name} stands for {list(shape)} in {form.kind.value}, which does not fill "
            f"{name}, {list(wanted)}, as it is stored"
        )
    check_joined(name, form, wanted, shape)
    if form.is_by_columns:
        form = form._replace(word_order=WordOrder.COMPRESSED_TENSORS)
    pieces, whole = arranged
    codes = Codes(name, form, part, whole, stored_dtype(first))
    return {f"{path}.{component_name(attribute, part)}": Target(pieces, codes=codes)}


def _shape_of_values(skeleton: PreTrainedModel, name: str) -> tuple[int, ...]:
    """Return the shape of a weight of the model, [..., out, in]."""
    shape = tuple(skeleton.get_parameter(name).shape)
    if is_transposed(skeleton.get_submodule(name.rpartition(".")[0])):
        return (*shape[:-2], shape[-1], shape[-2])
    return shape


def hold_codes(skeleton: PreTrainedModel, targets: Mapping[str, Target]) -> None:
    """Have a model, on the meta device, hold the parts of weights that ``targets`` find.

    Modules that are tied hold the same parts. Raises CheckpointError for one that cannot.
    """
    holders: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in skeleton.modules():
        for attribute, parameter in module._parameters.items():
            holders[id(parameter)].append((module, attribute))
    for name, parts in list_coded(targets).items():
        values = {
            part: nn.Parameter(
                torch.empty(codes.shape, dtype=codes.dtype, device="meta"), requires_grad=False
            )
            for part, (_, codes) in parts.items()
        }
        _, codes = parts[Component.WEIGHT]
        for module, attribute in holders[id(skeleton.get_parameter(name))]:
            check_module(name, codes.form, module)
            hold_stored(module, attribute, codes.form, values)


def list_coded(targets: Mapping[str, Target]) -> dict[str, dict[Component, tuple[str, Codes]]]:
    """List the weights whose values are not held, and the parameter that holds each part."""
    weights: dict[str, dict[Component, tuple[str, Codes]]] = {}
    for name, target in targets.items():
        if (codes := target.codes) is not None:
            weights.setdefault(codes.weight, {})[codes.part] = name, codes
    return weights
