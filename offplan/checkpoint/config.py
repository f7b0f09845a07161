"""Figures of ``config.json``, whose keys differ by architecture, and its fingerprint."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.jsontext import load_config, quote
from offplan.checkpoint.model_types import HUB_TYPES
from offplan.checkpoint.tensors import CONFIG_NAME
from offplan.errors import CheckpointError

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
MAX_COUNT = 2**40
"""Greatest number taken, past any model's, so that sizes of a hostile config stay printable."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that describes the language model: a nested one where there is one."""
    return _text_parts(config)[-1]


def _text_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the whole config, the part of it that the language model is in, and so on."""
    nested = (config.get(key) for key in _TEXT_KEYS)
    inner = next((each for each in nested if isinstance(each, Mapping) and each), None)
    return [config] if inner is None else [config, *_text_parts(inner)]


def states_quantisation(config: Mapping[str, Any]) -> bool:
    """Return True if it says how the model is quantised, in its own name or in its text part's.

    Source: transformers 5.23, ``get_hf_quantizer``.
    """
    return any(part.get("quantization_config") for part in (config, text_config(config)))


def read_count(config: Mapping[str, Any], *keys: str) -> int | None:
    """Read the first of these keys that holds a positive whole number.

    Ways to say "not used" count as absent: null, false, zero and negative numbers. So does a list
    of different numbers; a list of one number repeated is that number. Raises CheckpointError for
    text and the like.
    """
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None or isinstance(value, (bool, list)):
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or value > MAX_COUNT:
            raise CheckpointError(
                f"{CONFIG_NAME}: found {quote(value)} as {key}, expected a whole number; "
                "correct the file or fetch it again"
            )
        if value > 0:
            return value
    return None


def read_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that the config names, such as ``bfloat16``, or None."""
    values = (part.get(key) for part in _text_parts(config) for key in ("dtype", "torch_dtype"))
    return next((v.removeprefix("torch.") for v in values if isinstance(v, str)), None)


def read_model_type(config: Mapping[str, Any]) -> str:
    """Return transformers' name of ``model_type``, which some configs on the Hub give another.

    Raises CheckpointError if the config has none fit to be shown.
    """
    value = config.get("model_type")
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 100:
        raise CheckpointError(
            f"{CONFIG_NAME}: found {quote(value)} as model_type, expected a name such as 'qwen3'; "
            "correct the file or fetch it again"
        )
    return HUB_TYPES.get(value, value)


def class_type(model_type: str, config: Mapping[str, Any]) -> str:
    """Return the model type whose classes transformers takes for a ``config.json`` of this type.

    Source: transformers 5.23, ``AutoConfig.from_pretrained``.
    """
    return "ministral" if model_type == "mistral" and "layer_types" in config else model_type


GENERATION_NAME = "generation_config.json"
NO_GENERATION = ""
"""Fingerprint of a generation config if a model has none."""
_VOLATILE = frozenset(
    ("_commit_hash", "_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version")
)
"""Keys of a config that change nothing that a model gives, or (its types) are checked apart."""


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of all in a config that may change what a model gives."""
    content = json.dumps(_without_volatile(config), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def fingerprint_generation(data: bytes) -> str:
    """Return the fingerprint of a ``generation_config.json``, also where it is no valid JSON.

    Such a file is for ``run`` to refuse: a plan can be made without it.
    """
    try:
        return fingerprint(load_config(data, GENERATION_NAME))
    except CheckpointError:
        return hashlib.sha256(data).hexdigest()


def _without_volatile(value: Any) -> Any:
    """Drop volatile keys of a config, at every depth."""
    if isinstance(value, list):
        return [_without_volatile(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_volatile(each) for key, each in value.items() if key not in _VOLATILE}
