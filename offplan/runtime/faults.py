"""Running out of memory is told as what it was for and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offplan.errors import MemoryLimitError, Topic

_OF_HOST = "can't allocate memory"
_SIGNS = ("out of memory", "ALLOC_FAILED", _OF_HOST)
"""Parts of what torch says when the driver, cuBLAS or the host has no memory left."""


@contextmanager
def memory_limits(doing: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a MemoryLimitError.

    ``doing`` says what for: ``reading the prompt``. Works as a decorator too. Other errors pass.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        cause = find_cause(error)
        if cause is None:
            raise
        # torch tells what it wanted and what is free, then at length how the rest is spread
        details = " ".join(str(cause).split()).split(". ")[:3]
        told = f" ({'. '.join(details).rstrip('.')})" * bool(details[0])
        raise MemoryLimitError(
            f"memory ran out while {doing}{told}. Close what else uses it, or plan again with a "
            "smaller `gpu_memory`, `batch` or `context`",
            topic=Topic.HOST_MEMORY if _is_of_host(cause) else Topic.GPU_MEMORY,
        ) from error


def find_cause(error: BaseException | None) -> BaseException | None:
    """Find the first error, from this one on to its causes, that is about memory; None without.

    A capture that an allocation ended fails once more when it is closed.
    """
    while error is not None:
        says_so = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
        if says_so or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_of_host(cause: BaseException) -> bool:
    return isinstance(cause, MemoryError) or _OF_HOST in str(cause)
