"""A checkpoint before it is understood: its config and the tensors' descriptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offplan.checkpoint.tensors import TensorInfo

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A checkpoint as its source describes it."""

    config: Mapping[str, Any]
    """``config.json``, as read."""
    tensors: tuple[TensorInfo, ...]
    """All tensors, in no particular order."""
    revision: str | None = None
    """The Hub commit; None off the Hub."""
    notes: tuple[str, ...] = ()
    """Sentences on what the source could not tell."""
