"""Names all that the host's cores' figures depend on, so that they are kept and found again."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from offplan.disk_cache import KeptAnswers
from offplan.held.stage import Stage
from offplan.hostcores.build import name_source
from offplan.hostmem.hardware import name_hardware

_NAMES = frozenset(
    {"cores", "host_threads", "cores_beside_copies", "host_reads", "cores_round_trip"}
)
"""Keys that ``measure_cores`` gives."""


def cores_key(device: torch.device, stage: Stage | None) -> dict[str, Any]:
    """Name all that ``measure_cores`` depends on, of a model or of none, as plain JSON."""
    layers = [] if stage is None else [stage.time_key(layer.key) for layer in stage.layers]
    model = None if stage is None else stage.model.key  # which has how many experts a token has
    return name_hardware(device) | {"library": name_source(), "model": model, "layers": layers}


def _encode(figures: Mapping[str, Any]) -> bytes:
    return json.dumps(figures).encode()


def _decode(content: bytes) -> Mapping[str, Any]:
    figures = json.loads(content)
    if not isinstance(figures, dict) or not {"cores"} <= set(figures) <= _NAMES:
        raise ValueError("no figures of the host's cores")
    return figures


HOST_CORES: KeptAnswers[Mapping[str, Any]] = KeptAnswers("host-cores", 2**20, _encode, _decode)
"""Figures of the host's cores, by their key in a profile."""
