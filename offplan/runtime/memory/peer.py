"""Another GPU whose memory is the store: found and checked."""

import torch

from offplan.errors import MemoryLimitError
from offplan.units import format_bytes


def find_peer(device: torch.device, num_bytes: int) -> torch.device:
    """Find the first other CUDA device that reaches ``device`` directly, ``num_bytes`` free.

    Memory that torch has cached there counts as free. Asking makes a context on each device that is
    asked, which takes some of its memory. Raises MemoryLimitError, naming what was found, when none
    will do.
    """
    own = torch.cuda.current_device() if device.index is None else device.index
    found = []
    for other in range(torch.cuda.device_count()):
        if other == own:
            continue
        # torch copies between GPUs from the source's side: it is the peer that needs access
        if not torch.cuda.can_device_access_peer(other, own):
            found.append(f"cuda:{other} without peer access to cuda:{own}")
            continue
        cached = torch.cuda.memory_reserved(other) - torch.cuda.memory_allocated(other)
        free = torch.cuda.mem_get_info(other)[0] + cached
        if free >= num_bytes:
            return torch.device("cuda", other)
        found.append(f"cuda:{other} with {format_bytes(free)} free")
    raise MemoryLimitError(
        f"`store: peer` needs a second GPU with peer access to cuda:{own} and "
        f"{format_bytes(num_bytes)} free; found {', '.join(found) or 'no other GPU'}. Close what "
        "else uses it, show this process more GPUs (CUDA_VISIBLE_DEVICES), or plan with "
        "`store: host`"
    )
