"""What the card says is in use, the CUDA context included."""

import gc
import os
import shutil
import subprocess

import torch


def bytes_in_use(device: torch.device) -> int:
    """Memory in use on the card by all processes; 0 on the CPU.

    Asks the driver from outside the process, so that it can be called before the context exists.
    """
    if device.type != "cuda":
        return 0
    if shutil.which("nvidia-smi") is None:
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    name = visible.split(",")[index] if visible else str(index)
    query = [
        "nvidia-smi",
        f"--id={name}",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    return int(answer.stdout.strip()) * 2**20


def return_memory(device: torch.device) -> None:
    """Give back to the card what sessions that are gone have left with torch.

    Compiled code goes too: it may keep the tensors that it was compiled for.
    """
    if device.type == "cuda":
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
