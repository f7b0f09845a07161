"""Measures this machine: the link, the device's memory and its matrix rate.

Only the files of this room whose names begin with ``measure`` import torch; import them when
measuring, not before.
"""

from collections.abc import Callable
from functools import partial

import torch

from offplan.errors import MemoryLimitError, Topic
from offplan.machine.measure_host import measure_pinning, measure_place
from offplan.machine.measure_link import (
    measure_concurrent,
    measure_in_place,
    measure_pageable,
    measure_peer,
    measure_pinned,
)
from offplan.machine.measure_time import figure, time_work
from offplan.machine.profile import LAUNCHES, MachineProfile
from offplan.progress import Progress

LIBRARY_BYTES = 100 * 2**20
"""Bytes of a process that has run a model, beside the tensors that graphs keep
(``activation_bytes``): libraries' workspaces, kernels and captured graphs. Some MiB are in both.

Source: eight plans of Qwen3-8B and DeepSeek-V2-Lite on an H200 with torch 2.11 took 61 to 142 MiB
less than is predicted so. Of these, 28 to 74 MiB are margin
(``benchmarks/results/packed-h200.json``).
"""

LEAST_CONTEXT = 128 * 2**20
"""Bytes that a context takes with the libraries that measuring loads, at least. Source: estimated,
a sixth of what they take on an H200.
"""


def measure_machine(
    on_progress: Progress | None = None, *, with_others: bool = False, bytes_of_others: int = 0
) -> MachineProfile:
    """Measure the current CUDA device and its link to host memory, in some seconds.

    Every timed figure is the median of NUM_SAMPLES, timed by CUDA events after a warm-up; pinning
    by the host's clock. Takes about 1 GiB on the device and half of that on the host, and gives it
    back. ``with_others`` also uses the host's other GPUs: copies to several at once, and from a
    peer's memory. ``bytes_of_others`` are in use on the device by other processes, which is no
    overhead of this one. Raises MemoryLimitError if the device or the host has no room.
    """
    steps: list[Callable[[], dict[str, object]]] = [
        measure_place,
        measure_pinned,
        measure_pageable,
        measure_in_place,
        measure_pinning,
        _measure_hbm,
        _measure_matmul,
        _measure_launch,
        # before other GPUs are reached, which takes memory of this one
        partial(_measure_memory, bytes_of_others),
    ]
    if with_others:
        steps += [measure_concurrent, measure_peer]
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    figures: dict[str, object] = {"name": gpu.name, "link": "host link"}
    try:
        for number, step in enumerate(steps):
            figures.update(step())
            torch.cuda.empty_cache()
            if on_progress is not None:
                on_progress(number + 1, len(steps))
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise MemoryLimitError(
            f"the GPU has no room to be measured, which takes about 1 GiB: {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB are free; close what else uses it",
            topic=Topic.GPU_MEMORY,
        ) from error
    return MachineProfile.model_validate(figures)


def _measure_hbm() -> dict[str, object]:
    weight = torch.zeros(2**16, 8192, dtype=torch.bfloat16, device="cuda")
    vector = torch.zeros(8192, 1, dtype=torch.bfloat16, device="cuda")
    timing = time_work(lambda: weight @ vector, repeats=4)
    how = "matrix-vector product over 1 GiB"
    return {"hbm": figure(weight.nbytes / timing.seconds, how, timing.spread)}


def _measure_matmul() -> dict[str, object]:
    size = 8192
    # zeros would run faster than weights do: they switch fewer transistors
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    timing = time_work(lambda: a @ b, repeats=20)
    how = f"bf16 products of {size}^3, back to back"
    return {"matmul": figure(2 * size**3 / timing.seconds, how, timing.spread)}


def _measure_launch() -> dict[str, object]:
    """Time small kernels in a captured graph."""
    small = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    small.add_(1)
    graph = torch.cuda.CUDAGraph()
    # torch's own capture stream belongs to whichever device captured first
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(100):
            small.add_(1)
    timing = time_work(graph.replay)
    seconds = timing.seconds / 100 * LAUNCHES
    how = f"{LAUNCHES} captured small kernels"
    return {"layer_overhead": figure(seconds, how, timing.spread, basis="estimated")}


def _measure_memory(bytes_of_others: int) -> dict[str, object]:
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved()
    # if less than a context is left, others have let go of some since they were asked
    beside = used - bytes_of_others if used >= bytes_of_others + LEAST_CONTEXT else used
    how = "memory in use beside tensors, and LIBRARY_BYTES"
    return {
        "gpu_memory": figure(total, "cudaMemGetInfo"),
        "gpu_overhead": figure(beside + LIBRARY_BYTES, how),
    }
