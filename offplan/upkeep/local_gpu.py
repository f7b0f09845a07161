"""The GPU of this machine, as far as it can be known without measuring it."""

from dataclasses import dataclass

from offplan.library.machines import has_gpu


@dataclass(frozen=True)
class LocalGPU:
    """The current CUDA device."""

    name: str
    num_gpus: int
    """GPUs that this process sees, this one included."""
    total_bytes: int
    free_bytes: int
    """Bytes of its memory that no process has taken."""
    numa_node: int | None
    """The host's memory that is nearest to it; None if the kernel names none."""


def find_local_gpu() -> LocalGPU | None:
    """Look at the current CUDA device; None if there is none. Imports torch if there is."""
    if not has_gpu():
        return None
    import torch

    from offplan.machine.measure_host import find_gpu_node
    from offplan.runtime.device import device_name
    from offplan.runtime.memory.gpu_memory import bytes_in_use

    device = torch.device("cuda", torch.cuda.current_device())
    used = bytes_in_use(device)  # first, since the next line makes a context on the card
    _, total = torch.cuda.mem_get_info(device)
    return LocalGPU(
        name=device_name(device),
        num_gpus=torch.cuda.device_count(),
        total_bytes=total,
        free_bytes=total - used,
        numa_node=find_gpu_node(),
    )
