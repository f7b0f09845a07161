"""Weights that are held in another form than their values: what fills each of their parts."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.forms.form import Component, WordOrder
from offplan.runtime.forms.runnable import (
    check_form,
    check_joined,
    check_module,
    is_transposed,
    part_shape,
)
from offplan.runtime.forms.stored import component_name, hold_stored
from offplan.runtime.loading.pieces import arrange
from offplan.runtime.loading.sources import Gathered
from offplan.runtime.loading.staging import stored_dtype
from offplan.runtime.loading.target import Codes, Target
from offplan.runtime.refusal import refuse


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
