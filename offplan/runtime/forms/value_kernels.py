"""Products of very few rows by weights that are held by their values: one launch for several."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from offplan.runtime.forms.kernels import find_weight

FEW_OUT = 256
"""Outputs below which a program takes one row of a weight, of all of its length if that fits."""
BLOCK_OUT, BLOCK_IN = 8, 512
"""Rows, and columns of each, that a program multiplies at a time. Three tiles are on their way.

Source: an H200. 5,120 x 2,880 by one row takes 10.5 us so, and 201,088 x 2,880 by two rows 280.
Tiles of 4 x 1,024 take 11.9 and 316. One of these at a time took 13.4 and 401.
"""
MOST_SUMS, SUMS_BY_WARP = 2**14, 2**11
"""Sums of a program that takes one row of a weight, and of each of its warps, at most.

With more its threads have too few registers. Four rows of 8,192 columns by 4 warps stored 4,616
bytes a thread in local memory, which a GPU sets aside for all that it can run. Source: triton 3.7's
kernels for compute capabilities 8.0 to 12.0.
"""


@triton.jit
def multiply_few(  # type: ignore[no-untyped-def]
    x, out, weight, bias, num_in, num_out, more, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of one of several weights: times ROWS inputs.

    ``more`` is what ``find_weight`` is told of further weights, with biases in place of scales.
    """
    n, rows, before, _, at_values, at_biases = find_weight(more, num_out, BLOCK_N)
    is_row = n < rows
    m = tl.arange(0, ROWS)
    values = weight + at_values + n.to(tl.int64)[:, None] * num_in
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], dtype=tl.float32)
    STAGES: tl.constexpr = 3 if BLOCK_N > 1 else 1  # one row's tile is all of it, or little less
    for start in tl.range(0, num_in, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < num_in
        is_value = is_row[:, None] & inside[None, :]
        w = tl.load(values + k[None, :], mask=is_value, other=0.0).to(tl.float32)
        at = x + m[:, None] * num_in + k[None, :]
        v = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
        sums += w[None, :, :] * v[:, None, :]
    made = tl.sum(sums, 2)
    if bias is not None:
        made += tl.load(bias + at_biases + n, mask=is_row, other=0.0).to(tl.float32)[None, :]
    where = out + ROWS * before + m[:, None] * rows + n[None, :]
    tl.store(where, made.to(out.dtype.element_ty), mask=is_row[None, :])


def multiply_values(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Multiply rows, [rows, in], by weights, [out, in] each, and add biases, [out], if any.

    Rows are a power of two, and all weights have a bias or none has. Returns the products by the
    first weight, [rows, out], then those by the next, all flat. A product is the same beside
    whichever other weights of its kind (``is_small``).
    """
    first, num_in = weights[0], x.shape[1]
    tile, warps = choose_tile(len(x), num_in) if is_small(first) else ((BLOCK_OUT, BLOCK_IN), 4)
    sizes = [len(weight) for weight in weights]
    ends = [*accumulate(triton.cdiv(size, tile[0]) for size in sizes)]
    told: list[int] = []
    for index in range(1, len(weights)):
        told += [sizes[index], ends[index - 1], _distance(weights[index], first)]
        told.append(_distance(biases[index], biases[0]) if biases else 0)
    out = x.new_empty(len(x) * sum(sizes))
    multiply_few[(ends[-1],)](
        x.contiguous(), out, first, biases[0] if biases else None, num_in, sizes[0],
        tuple(told) or None, ROWS=len(x), BLOCK_N=tile[0], BLOCK_K=tile[1], num_warps=warps,
    )  # fmt: skip
    return out


def choose_tile(num_rows: int, num_in: int) -> tuple[tuple[int, int], int]:
    """Choose a program's tile of a small weight, [outputs, columns], and its warps."""
    columns = min(triton.next_power_of_2(num_in), MOST_SUMS // num_rows)
    return (1, columns), max(4, num_rows * columns // SUMS_BY_WARP)


def is_small(weight: torch.Tensor) -> bool:
    """Return True if a program takes one row of a weight, [out, in]."""
    return len(weight) < FEW_OUT


def _distance(own: torch.Tensor, first: torch.Tensor) -> int:
    distance, rest = divmod(own.data_ptr() - first.data_ptr(), own.itemsize)
    assert not rest  # tensors begin at multiples of more bytes than an element has
    return distance
