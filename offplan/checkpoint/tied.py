"""Tied weights that a checkpoint stores all the same."""

from collections.abc import Iterable, Mapping
from typing import Any

from offplan.checkpoint.config import text_config
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import INPUT_EMBEDDINGS, OUTPUT_HEADS
from offplan.checkpoint.stored import CONFIG_NAME
from offplan.checkpoint.tensors import TensorInfo
from offplan.checkpoint.tie_defaults import TIED_BY_DEFAULT, UNTIED_BY_DEFAULT


def find_tied(
    config: Mapping[str, Any], outside: Iterable[TensorInfo]
) -> tuple[frozenset[str], list[str]]:
    """Return the names of stored heads that share the input embedding's storage once loaded.

    A head is tied when both have one shape and dtype and the config says ``tie_word_embeddings``;
    where it says nothing, the model type's default in transformers decides. The notes say when
    the answer was not the config's own.
    """
    alike = _heads_like_embeddings(outside)
    stated = _says_tied(config)
    if not alike or stated is not None:
        return (alike if stated else frozenset()), []
    model_type = text_config(config).get("model_type") or config.get("model_type")
    if model_type in UNTIED_BY_DEFAULT:
        return frozenset(), []
    if model_type in TIED_BY_DEFAULT:
        taken, reason = alike, f"the default of {quote(model_type)}"
    else:
        taken, reason = frozenset(), f"the default of {quote(model_type)} is not known"
    note = (
        f"{CONFIG_NAME} does not say whether the stored head is the embedding: took it for "
        f"{'tied' if taken else 'its own'} ({reason})"
    )
    return taken, [note]


def _heads_like_embeddings(outside: Iterable[TensorInfo]) -> frozenset[str]:
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


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    # The outer config decides where it speaks, as in transformers.
    for part in (config, text_config(config)):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None
