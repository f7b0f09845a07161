"""The device that a session runs on: found, made current, given a stream, waited for."""

from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from offplan.errors import InputError, Topic


def find_device(wanted: str | torch.device | None) -> torch.device:
    """Find the device of this name, or the best there is; raises InputError if it is not here."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"{wanted!r} is not a device: write cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no {device} here: {torch.cuda.device_count()} GPUs are visible",
            topic=Topic.NO_GPU,
        )
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"offplan runs on cuda and cpu; {device} is neither")
    return device


def device_name(device: torch.device) -> str:
    """Name a device as people do: ``NVIDIA H200``, ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a CUDA device is the current one; nothing changes for the CPU.

    Calls that name no device, as page locks do, would else make a context on the first GPU.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def open_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Make a stream that begins behind what is queued on the current one; None on the CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def settle(device: torch.device) -> None:
    """Let the device finish all that was queued, on every stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def let_go(device: torch.device) -> None:
    """Wait until the device is done with host memory, whatever state an error left it in.

    A device that failed reports its error at every call, but host memory is to be given back all
    the same. The error that is already on its way is the one to show.
    """
    with suppress(RuntimeError):
        settle(device)
