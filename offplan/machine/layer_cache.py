"""Layer times kept on disk, so that a second plan for a model need not load and time its layers."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from offplan.machine.profile import LayerTime

_LAYER_TIMES = TypeAdapter(tuple[LayerTime, ...])


class LayerTimeCache:
    """The layer times of one model at one workload, under all that they depend on.

    One file ``HF_HOME/offplan/layer-times/<digest of the key>.json`` with the key and the times. A
    file that cannot be read, or is not valid, counts as absent.
    """

    def __init__(self, home: Path, key: Mapping[str, Any]) -> None:
        """``key`` is plain JSON: a change of anything in it is another entry."""
        self._key = json.loads(json.dumps(key))
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self._path = home / "offplan" / "layer-times" / f"{name}.json"

    def load(self) -> tuple[LayerTime, ...] | None:
        """Return the times, or None when there are none to be read."""
        try:
            content = json.loads(self._path.read_bytes())
            if content["key"] != self._key:
                return None
            return _LAYER_TIMES.validate_python(content["layer_times"])
        except (OSError, ValueError, TypeError, KeyError, ValidationError):
            return None

    def store(self, times: Sequence[LayerTime]) -> bool:
        """Keep the times; they appear whole or not at all. False where the disk refuses them."""
        content = {"key": self._key, "layer_times": [time.model_dump() for time in times]}
        temporary = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # another run may write the same entry: each has its own file until the rename
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, self._path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return False
        return True
