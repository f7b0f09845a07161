"""Memory in use on the card, as it says itself, the CUDA context included."""

import gc
import subprocess
from collections.abc import Callable
from contextlib import suppress

import torch

from offplan.runtime.device import settle


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes in use on the card by all processes; 0 on the CPU.

    Makes no context: before there is one, nvidia-smi is asked, which counts alike.
    """
    if device.type != "cuda":
        return 0
    if not torch.cuda.memory_reserved(device):  # which makes none, and is 0 without one
        query = [
            "nvidia-smi",
            # by its name: CUDA and nvidia-smi may count the host's GPUs in another order
            f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        # not there, not answering, or `[N/A]`, as where the GPU shares the host's memory
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
            return int(answer.stdout) * 2**20
    free, total = torch.cuda.mem_get_info(device)  # in microseconds, where nvidia-smi takes 30 ms
    return total - free


def has_context(device: torch.device) -> bool:
    """Return True if this process has a context on a card, or if torch does not say."""
    known = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    index = torch.cuda.current_device() if device.index is None else device.index
    return known is None or bool(known(index))


class PeakMemory:
    """Keeps account of the most bytes in use on the card, by whomever; 0 of them on the CPU.

    torch's allocator gives nothing back but in ``release``, or if there is no memory left. So what
    is in use at any other time is the most since the last of these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._peak = bytes_in_use(device)

    @property
    def in_use(self) -> int:
        """Most bytes in use on the card since the account began."""
        return max(self._peak, bytes_in_use(self._device))

    @property
    def taken(self) -> int:
        """Most bytes in use since the account began, beyond those in use when it did."""
        return self.in_use - self._before

    def release(self, drop: Callable[[], object]) -> None:
        """Give the card what ``drop`` lets go of, once it is done with it, and what is cached."""
        self._peak = self.in_use  # of all that came before
        settle(self._device)
        drop()
        torch.cuda.empty_cache()  # nothing where CUDA was never used


def return_memory(device: torch.device) -> None:
    """Give back to the card what sessions that are gone have left with torch.

    Compiled code goes too: it may keep the tensors that it was compiled for.
    """
    if device.type == "cuda":
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()  # nothing where CUDA was never used
