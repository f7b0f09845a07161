"""Tied weights that a checkpoint stores all the same."""

from collections.abc import Iterable, Mapping
from typing import Any

from offplan.checkpoint.config import text_config
from offplan.checkpoint.model import INPUT_EMBEDDINGS, OUTPUT_HEADS
from offplan.checkpoint.tensors import TensorInfo


def find_tied(config: Mapping[str, Any], outside: Iterable[TensorInfo]) -> frozenset[str]:
    """Return the names of stored heads that share the input embedding's storage once loaded.

    A head is tied when the config says ``tie_word_embeddings`` and both have one shape and dtype.
    """
    if not _says_tied(config):
        return frozenset()
    heads: dict[str, TensorInfo] = {}
    embeddings = set()
    for tensor in outside:
        parts = tensor.name.split(".")
        owner = parts[-2] if len(parts) > 1 else ""
        if parts[-1] == "weight" and owner in OUTPUT_HEADS:
            heads[tensor.name] = tensor
        elif parts[-1] == "weight" and owner in INPUT_EMBEDDINGS:
            embeddings.add((tensor.dtype, tensor.shape))
    return frozenset(name for name, head in heads.items() if (head.dtype, head.shape) in embeddings)


def _says_tied(config: Mapping[str, Any]) -> bool:
    # The outer config decides where it speaks, as in transformers.
    for part in (config, text_config(config)):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return False
