"""What a GPU has for the programs of a kernel."""

from typing import Any

import torch


@torch.compiler.assume_constant_result
def gpu_limits(index: int) -> tuple[int, int]:
    """Return a CUDA device's bytes of shared memory for a program, and its multiprocessors."""
    limits: Any = torch.cuda.get_device_properties(index)  # typed without what newer GPUs have
    return limits.shared_memory_per_block_optin, limits.multi_processor_count


@torch.compiler.assume_constant_result
def compute_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)
