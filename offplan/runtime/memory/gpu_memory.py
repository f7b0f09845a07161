"""What the card says is in use, the CUDA context included."""

import gc
import subprocess

import torch


def bytes_in_use(device: torch.device) -> int:
    """Memory in use on the card by all processes; 0 on the CPU.

    Makes no context: before there is one, nvidia-smi is asked, which counts alike.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.memory_reserved(device):  # which makes none, and is 0 without one
        return _used_by_context(device)
    # by its name: CUDA and nvidia-smi may count the host's GPUs in another order
    index = torch.cuda.current_device() if device.index is None else device.index
    query = [
        "nvidia-smi",
        f"--id=GPU-{torch.cuda.get_device_properties(index).uuid}",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return int(answer.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        # not there, not answering, or `[N/A]`, as where the GPU shares the host's memory
        return _used_by_context(device)


def _used_by_context(device: torch.device) -> int:
    """The same, from inside the process, in microseconds instead of 30 ms."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def return_memory(device: torch.device) -> None:
    """Give back to the card what sessions that are gone have left with torch.

    Compiled code goes too: it may keep the tensors that it was compiled for.
    """
    if device.type == "cuda":
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
