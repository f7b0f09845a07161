"""The device that a session runs on: made current, given a stream, waited for."""

from contextlib import AbstractContextManager, nullcontext, suppress

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a CUDA device is the current one; nothing changes for the CPU.

    What names no device, as page locks do, would else make a context on the first GPU.
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

    A device that failed reports its error at every call; host memory is to be given back all the
    same, and the error that is already on its way is the one to show.
    """
    with suppress(RuntimeError):
        settle(device)
