"""Names a host and its GPU, for figures that are kept on disk and found again."""

import os
from pathlib import Path
from typing import Any

import torch

from offplan.hostmem.limits import core_quota, read_numbers, read_text


def name_hardware(device: torch.device) -> dict[str, Any]:
    """Name processor, cores, memory, GPU and driver, as plain JSON. Linux and CUDA only.

    A container's quota and cores are part of it.
    """
    gpu = torch.cuda.get_device_properties(device)
    cpus = read_text(Path("/proc/cpuinfo")).splitlines()
    told = {line.split(":")[0].strip(): line for line in cpus if ":" in line}
    return {
        "cpu": [told.get(name, "") for name in ("vendor_id", "model name", "flags")],
        "cores": sorted(os.sched_getaffinity(0)),
        "quota": core_quota(),
        "memory": read_numbers(Path("/proc/meminfo")).get("MemTotal"),
        "gpu": [gpu.name, gpu.total_memory, gpu.multi_processor_count],
        "driver": read_text(Path("/proc/driver/nvidia/version")).strip(),
    }
