"""Models that were sized from a config alone, kept on disk: transformers builds one in seconds."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import DTYPE_BITS, TensorInfo, Tensors, split_expert
from offplan.disk_cache import KeptAnswers, installed_versions

_FIRST = ".experts.0."
"""The part of the name of a layer's first expert that has its index."""


def sized_key(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Name what the model depends on that is sized from ``config``, stored in ``dtype``."""
    return {"config": json.dumps(config), "dtype": dtype, **installed_versions()}


def _encode(model: Model) -> bytes:
    # as text: JSON's own numbers leave out the infinities that configs have
    as_text = replace(model, config={"": json.dumps(model.config)})
    return _adapter().dump_json(_with_tensors(as_text, _fold))


def _decode(content: bytes) -> Model:
    model = _adapter().validate_json(content, strict=True)
    if not all(map(_is_sound, model.tensors)):
        raise ValueError("these are no tensors of a model")
    return _with_tensors(replace(model, config=json.loads(model.config[""])), _unfold)


@cache
def _adapter() -> TypeAdapter[Model]:
    return TypeAdapter(Model)


def _with_tensors(model: Model, change: Callable[[Tensors], Tensors]) -> Model:
    """Return the model with the tensors changed that its layers' parameters are stored in."""

    def change_one(parameter: Parameter) -> Parameter:
        beside = tuple((part, change(tensors)) for part, tensors in parameter.beside)
        return replace(parameter, tensors=change(parameter.tensors), beside=beside)

    return replace(
        model,
        layers=tuple(
            replace(layer, parameters=tuple(map(change_one, layer.parameters)))
            for layer in model.layers
        ),
    )


def _fold(tensors: Tensors) -> Tensors:
    """Return the first and the last tensor of experts that are alike, else all."""
    ends = (tensors[0], tensors[-1])
    return ends if _unfold(ends) == tensors else tensors


def _unfold(tensors: Tensors) -> Tensors:
    """Return the tensors of all experts of which these are the first and the last."""
    first, last = tensors[0], tensors[-1]
    before, found, after = first.name.partition(_FIRST)
    if not found or len(tensors) != 2:
        return tensors
    number, _ = split_expert(last.name) or (0, "")
    names = (f"{before}.experts.{index}.{after}" for index in range(number + 1))
    alike = tuple(TensorInfo(name, first.dtype, first.shape) for name in names)
    return alike if alike[-1] == last else tensors


def _is_sound(tensor: TensorInfo) -> bool:
    sizes = (size >= 0 for size in tensor.shape)
    return tensor.name.isprintable() and tensor.dtype in DTYPE_BITS and all(sizes)


SIZED = KeptAnswers("sized", 2**26, _encode, _decode)
"""By ``sized_key``; no model takes so many bytes, with the first and the last of its experts."""
