"""Measures this machine: the link, the device's memory and its matrix rate.

The only file in this room that imports torch; import it when measuring, not before.
"""

import os
import statistics
from collections.abc import Callable

import torch

from offplan.errors import OffplanError
from offplan.machine.profile import MachineProfile

NUM_SAMPLES = 7
LARGE_BYTES = 256 * 2**20
"""Size of the copies that give the link's rate; its curve is flat from 64 MiB on."""
SMALL_BYTES = 64 * 2**10
"""Size of the copies that give the cost of one copy."""

Progress = Callable[[int, int], None]
"""Called with steps done and steps in all."""


def measure_machine(on_progress: Progress | None = None) -> MachineProfile:
    """Measure the current CUDA device and its link to host memory, in a few seconds.

    Every figure is the median of NUM_SAMPLES, timed by CUDA events after a warm-up. Raises
    OffplanError when there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise OffplanError(
            "no CUDA device to measure: name a machine with --machine, or measure where it is"
        )
    steps: list[Callable[[], float]] = [_h2d, _copy_latency, _uva, _hbm, _matmul, _launch]
    values = []
    for number, step in enumerate(steps):
        values.append(step())
        if on_progress is not None:
            on_progress(number + 1, len(steps))
    h2d, latency, uva, hbm, matmul, launch = values
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    torch_version = f"torch {torch.__version__}"

    def measured(value: float, how: str) -> dict[str, object]:
        return {"value": value, "basis": "measured", "source": f"{how}, {torch_version}"}

    return MachineProfile.model_validate(
        {
            "name": properties.name,
            "link": "host link",
            "h2d": measured(h2d, "pinned DMA of 256 MiB"),
            "copy_latency": measured(latency, "pinned DMA of 64 KiB, less its bytes"),
            "uva": measured(uva, "matrix-vector product reading 256 MiB of pinned memory in place"),
            "hbm": measured(hbm, "matrix-vector product over 2 GiB"),
            "matmul": measured(matmul, "bf16 products of 8192^3, back to back"),
            "layer_overhead": {
                "value": launch * KERNELS_PER_LAYER,
                "basis": "estimated",
                "source": f"{KERNELS_PER_LAYER} captured small kernels, {torch_version}",
            },
            "gpu_memory": measured(total, "cudaMemGetInfo"),
            "host_memory": measured(_host_bytes(), "physical memory"),
            "gpu_overhead": measured(
                total - free - torch.cuda.memory_reserved() + LIBRARY_BYTES,
                "memory in use beside tensors, and LIBRARY_BYTES",
            ),
        }
    )


LIBRARY_BYTES = 400 * 2**20
"""Workspaces of libraries, kernels and captured graphs of a process that has run a model.

Source: measured on an H200 with Qwen3-8B and DeepSeek-V2-Lite (361 MiB each), torch 2.11.
"""

KERNELS_PER_LAYER = 20
"""Small kernels of one decoder layer as transformers writes it: norms, rotary, residuals."""


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _median_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Median time of one call, by events on the current stream."""
    work()
    samples = []
    for _ in range(NUM_SAMPLES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) / 1e3 / repeats)
    return statistics.median(samples)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _h2d() -> float:
    source, target = _pinned(LARGE_BYTES), torch.empty(LARGE_BYTES, dtype=torch.uint8).cuda()
    return LARGE_BYTES / _median_seconds(lambda: target.copy_(source, non_blocking=True))


def _copy_latency() -> float:
    source, target = _pinned(SMALL_BYTES), torch.empty(SMALL_BYTES, dtype=torch.uint8).cuda()
    seconds = _median_seconds(lambda: target.copy_(source, non_blocking=True), repeats=200)
    return max(0.0, seconds - SMALL_BYTES / _h2d())


def _uva() -> float:
    host = _pinned(LARGE_BYTES)

    class InPlace:
        """The same pages as the GPU sees them. Source: CUDA array interface, version 3."""

        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (LARGE_BYTES,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }

    weight = torch.as_tensor(InPlace(), device="cuda").view(torch.bfloat16).view(-1, 4096)
    vector = torch.zeros(4096, 1, dtype=torch.bfloat16, device="cuda")
    return LARGE_BYTES / _median_seconds(lambda: weight @ vector)


def _hbm() -> float:
    weight = torch.zeros(2**30 // 8192, 8192, dtype=torch.bfloat16, device="cuda")
    vector = torch.zeros(8192, 1, dtype=torch.bfloat16, device="cuda")
    return weight.nbytes / _median_seconds(lambda: weight @ vector)


def _matmul() -> float:
    size = 8192
    # zeros would run faster than weights do: they switch fewer transistors
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b, repeats=20)


def _launch() -> float:
    """Time of one small kernel in a captured graph."""
    small = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    small.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            small.add_(1)
    return _median_seconds(graph.replay) / 100
