"""Running out of memory, told as what it was for and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offplan.errors import MemoryLimitError
from offplan.units import format_bytes

_SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""In what torch says when the driver, cuBLAS or the host has no memory left."""


@contextmanager
def memory_limits(doing: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a MemoryLimitError.

    ``doing`` says what for: ``reading the prompt``. Works as a decorator too. Other errors pass.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"memory ran out while {doing}{_free()}. Close what else uses it, or plan again with "
            "a smaller --gpu-memory, --batch or --context"
        ) from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it came from, is about memory.

    A capture that an allocation ended fails once more when it is closed.
    """
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free() -> str:
    """What the driver says is free on the current GPU, if there is one that still answers."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the device is beyond telling
        return ""
    return f" ({format_bytes(free)} of {format_bytes(total)} are free on the GPU)"


def let_go(device: torch.device) -> None:
    """Wait until the device is done with host memory, whatever state an error left it in.

    A device that failed reports its error at every call; host memory is to be given back all the
    same, and the error that is already on its way is the one to show.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return
