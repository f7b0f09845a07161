"""Layer times kept on disk, so that a second plan for a model need not load and time its layers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from offplan.files import keep, read_kept
from offplan.machine.profile import LayerTime

_LAYER_TIMES = TypeAdapter(tuple[LayerTime, ...])
_MAX_BYTES = 2**26
"""Bytes of the longest file that is read, past any model's: one time takes some 200."""


class LayerTimeCache:
    """The layer times of one model at one workload, under all that they depend on.

    One file ``HF_HOME/offplan/layer-times/<digest of the key>.json`` with the key and the times
    after a checksum. A file that cannot be read, or is not valid, counts as absent.
    """

    def __init__(self, home: Path, key: Mapping[str, Any]) -> None:
        """``key`` is plain JSON: a change of anything in it is another entry."""
        self._key = json.loads(json.dumps(key))
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self._path = home / "offplan" / "layer-times" / f"{name}.json"

    def load(self) -> tuple[LayerTime, ...] | None:
        """Return the times, or None when there are none to be read."""
        kept = read_kept(self._path, _MAX_BYTES)
        if kept is None:
            return None
        try:
            content = json.loads(kept)
            if content["key"] != self._key:
                return None
            return _LAYER_TIMES.validate_python(content["layer_times"])
        except (ValueError, TypeError, KeyError, ValidationError):
            return None

    def store(self, times: Sequence[LayerTime]) -> bool:
        """Keep the times; they appear whole or not at all. False where the disk refuses them."""
        content = {"key": self._key, "layer_times": [time.model_dump() for time in times]}
        return keep(self._path, json.dumps(content, indent=1).encode())
