"""Names all that the host's cores' figures depend on, so that they are kept and found again."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offplan.disk_cache import KeptAnswers
from offplan.hostmem.limits import core_quota, read_numbers, read_text

_NAMES = frozenset(
    {"cores", "host_threads", "cores_beside_copies", "host_reads", "cores_round_trip"}
)
"""Keys that ``measure_cores`` gives."""
_SOURCES = Path(__file__).parents[2] / "hostcores"


def cores_key(device: torch.device) -> dict[str, Any]:
    """Name the hardware that ``measure_cores`` measures without a model, as plain JSON.

    A container's quota and cores are part of it, and so are the kernels' sources.
    """
    gpu = torch.cuda.get_device_properties(device)
    cpus = read_text(Path("/proc/cpuinfo")).splitlines()
    told = {line.split(":")[0].strip(): line for line in cpus if ":" in line}
    sources = sorted(path for path in _SOURCES.rglob("*") if path.suffix not in ("", ".pyc", ".so"))
    return {
        "cpu": [told.get(name, "") for name in ("vendor_id", "model name", "flags")],
        "cores": sorted(os.sched_getaffinity(0)),
        "quota": core_quota(),
        "memory": read_numbers(Path("/proc/meminfo")).get("MemTotal"),
        "gpu": [gpu.name, gpu.total_memory, gpu.multi_processor_count],
        "driver": read_text(Path("/proc/driver/nvidia/version")).strip(),
        "kernels_sha256": hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest(),
    }


def _encode(figures: Mapping[str, Any]) -> bytes:
    return json.dumps(figures).encode()


def _decode(content: bytes) -> Mapping[str, Any]:
    figures = json.loads(content)
    if not isinstance(figures, dict) or not {"cores"} <= set(figures) <= _NAMES:
        raise ValueError("no figures of the host's cores")
    return figures


HOST_CORES: KeptAnswers[Mapping[str, Any]] = KeptAnswers("host-cores", 2**20, _encode, _decode)
"""Figures of the host's cores, by their key in a profile."""
