"""Measures what other GPUs of the host do to the link, and what their memory is as a store.

Takes a CUDA context on each of them until the process ends.
"""

from contextlib import ExitStack, suppress

import torch

from offplan.machine.curve import CopyRate
from offplan.machine.measure_host import PINNED_BYTES, pinned
from offplan.machine.measure_link import copy_curve, describe_dma
from offplan.machine.measure_time import NUM_SAMPLES, summarise, table
from offplan.stores import SECOND_GPU_LINK

_SHARE_BYTES = 64 * 2**20
"""Bytes of each GPU's own pinned block; from this size on the rate is flat."""
_REPEATS = 16
"""Copies of that block in a sample, so that their beginnings and ends weigh little."""


def measure_concurrent() -> dict[str, object]:
    """Measure host to device while 2, 4, ... and all GPUs copy, the first ones of the host.

    Engines give processes these. A number of them of which one is taken is left out.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rates: list[dict[str, object]] = []
    for number in count_together(len(devices)):
        try:
            samples = _copy_together(devices[:number])
        except RuntimeError:  # out of memory, or in use by a process that shares it with none
            break
        for device, column in zip(devices, zip(*samples, strict=True), strict=False):
            timing = summarise(column)
            rate = {"rate": _SHARE_BYTES / timing.seconds, "spread": timing.spread}
            rates.append({"device": device.index, **rate, "num_gpus": number})
    how = "pinned DMA of so many GPUs at once, each from a block of its own"
    return {"h2d_concurrent": table(rates, how)} if rates else {}


def count_together(num_gpus: int) -> list[int]:
    """List the numbers of GPUs that copy at once: 2, 4, ... and all."""
    powers = (2**power for power in range(1, num_gpus.bit_length()))
    return sorted({*powers, num_gpus} - {0, 1})


def _copy_together(devices: list[torch.device]) -> list[list[float]]:
    """Return the seconds of one copy, a row a sample, a column a device; waits for all of them."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(pinned(_SHARE_BYTES)) for _ in devices]
        targets = [torch.empty(_SHARE_BYTES, dtype=torch.uint8, device=each) for each in devices]
        streams = [torch.cuda.Stream(each) for each in devices]
        samples = []
        for _ in range(NUM_SAMPLES + 1):  # the first one warms up
            marks = []
            for host, target, stream in zip(hosts, targets, streams, strict=True):
                with torch.cuda.stream(stream):  # makes the stream's device current, too
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for _ in range(_REPEATS):
                        target.copy_(host, non_blocking=True)
                    stop.record()
                marks.append((start, stop))
            for _, stop in marks:
                stop.synchronize()
            samples.append([start.elapsed_time(stop) / 1e3 / _REPEATS for start, stop in marks])
        return samples[1:]


def measure_peer() -> dict[str, object]:
    """Measure DMA from the nearest other GPU's memory; nothing if none can be reached."""
    this = torch.cuda.current_device()
    curves: list[list[CopyRate]] = []
    for other in range(torch.cuda.device_count()):
        # torch copies from the source's side: it is the peer that needs access
        if other != this and torch.cuda.can_device_access_peer(other, this):
            with suppress(RuntimeError):  # as above: a GPU that cannot be used is no store
                curves.append(_copy_from(torch.device("cuda", other)))
    if not curves:
        return {}
    fastest = max(curves, key=lambda curve: curve[-1].rate)
    return {
        **describe_dma(fastest, SECOND_GPU_LINK.rate, SECOND_GPU_LINK.latency),
        "peer_curve": table(fastest, "DMA from another GPU, queued back to back"),
    }


def _copy_from(other: torch.device) -> list[CopyRate]:
    store = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=other)
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    return copy_curve(lambda size: target[:size].copy_(store[:size], non_blocking=True))
