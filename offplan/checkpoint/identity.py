"""Fingerprints of the small files that change what a model gives: config and generation config."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.jsontext import load_config
from offplan.errors import CheckpointError

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
