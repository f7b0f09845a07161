"""Layer times kept on disk, so that a second plan for a model need not load and time its layers."""

import json
from typing import Annotated

from pydantic import Field, TypeAdapter

from offplan.kept import KeptAnswers
from offplan.machine.profile import LayerTime

LayerTimes = Annotated[tuple[LayerTime, ...], Field(min_length=1)]
"""The layer times of one model at one workload on one machine."""
_ADAPTER: TypeAdapter[LayerTimes] = TypeAdapter(LayerTimes)


def _encode(times: LayerTimes) -> bytes:
    return json.dumps([time.model_dump() for time in times], indent=1).encode()


def _decode(content: bytes) -> LayerTimes:
    return _ADAPTER.validate_python(json.loads(content))


LAYER_TIMES = KeptAnswers("layer-times", 2**26, _encode, _decode)
"""One time takes some 200 bytes: no model's are as long as that."""
