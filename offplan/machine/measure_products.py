"""Measures how often a model's own products read weights that lie in host memory.

Which tiles a product is cut into, and so how often it reads a weight, differs from shape to shape.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.nn.functional import grouped_mm, linear

from offplan.hostmem.block import view_in_place
from offplan.machine.measure_host import PINNED_BYTES, pinned
from offplan.machine.measure_time import time_work
from offplan.machine.profile import InPlaceRead
from offplan.progress import Progress


def measure_in_place_reads(
    products: Sequence[tuple[tuple[int, ...], int]],
    pairs_per_token: int,
    uva: float,
    on_progress: Progress | None = None,
) -> tuple[InPlaceRead, ...]:
    """Time bf16 products on the current CUDA device, their weight in pinned memory.

    Each product is a shape and a number of tokens; products are sorted by both, in this order. A
    shape is [out, in], or [experts, out, in] for routed experts. Each token goes to
    ``pairs_per_token`` of the experts. ``uva`` is the rate of reading once, in bytes per second. A
    weight of more than PINNED_BYTES is cut along its first dimension: whole tiles are left out.
    Noise does not make more tokens read less. Raises MemoryLimitError.
    """
    reads: list[InPlaceRead] = []
    with pinned(PINNED_BYTES) as host:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = view_in_place(host, device).view(torch.bfloat16)
        for number, (shape, tokens) in enumerate(products):
            weight = _cut(memory, shape)
            seconds = time_work(_product(weight, shape, tokens, pairs_per_token)).seconds
            least = reads[-1].factor if reads and reads[-1].shape == shape else 1.0
            factor = max(least, seconds * uva / weight.nbytes)
            reads.append(InPlaceRead(shape=shape, tokens=tokens, factor=factor))
            if on_progress is not None:
                on_progress(number + 1, len(products))
    return tuple(reads)


def _cut(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """View as much of a weight of this shape as the memory holds."""
    first, *rest = shape
    held = min(first, memory.numel() // prod(rest))
    return memory[: held * prod(rest)].view(held, *rest)


def _product(
    weight: torch.Tensor, shape: tuple[int, ...], tokens: int, pairs_per_token: int
) -> Callable[[], torch.Tensor]:
    """Return the product as the runtime makes it; every expert has as many pairs."""
    size, dtype = weight.shape[-1], weight.dtype
    if weight.dim() == 2:
        hidden = torch.zeros(tokens, size, dtype=dtype, device="cuda")
        return lambda: linear(hidden, weight)
    pairs = max(1, tokens * pairs_per_token // shape[0])
    ends = torch.arange(1, len(weight) + 1, dtype=torch.int32, device="cuda") * pairs
    routed = torch.zeros(pairs * len(weight), size, dtype=dtype, device="cuda")
    return lambda: grouped_mm(routed, weight.mT, offs=ends)
