"""Tensors of models that transformers built, kept on disk: building them takes seconds."""

import json
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.quantise import Use
from offplan.checkpoint.tensors import TORCH_NAMES, TensorInfo
from offplan.kept import KeptAnswers, installed_versions

BuiltTensors = list[tuple[TensorInfo, Use]]
"""The tensors of an unquantised model, each with what the model does with it."""


def built_key(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name what the tensors depend on that transformers builds of ``config``."""
    return {"config": json.dumps(config), **installed_versions()}


def _encode(built: BuiltTensors) -> bytes:
    entries = [(tensor.name, tensor.dtype, tensor.shape, use.value) for tensor, use in built]
    return json.dumps(entries).encode()


def _decode(content: bytes) -> BuiltTensors:
    built = [
        (TensorInfo(name, dtype, tuple(shape)), Use(use))
        for name, dtype, shape, use in json.loads(content)
    ]
    if not built or not all(_is_sound(tensor) for tensor, _ in built):
        raise ValueError("these are no tensors of a model")
    return built


def _is_sound(tensor: TensorInfo) -> bool:
    is_named = isinstance(tensor.name, str) and tensor.name.isprintable()
    sizes = (type(size) is int and size >= 0 for size in tensor.shape)
    return is_named and tensor.dtype in TORCH_NAMES and all(sizes)


BUILT = KeptAnswers("built", 2**28, _encode, _decode)
"""By ``built_key``; no model's tensors take so many bytes."""
