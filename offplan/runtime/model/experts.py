"""Routed experts of a few tokens: every expert that is chosen is read once, where it lies.

A decode step reads weights and hardly computes, so what counts is that each byte crosses once,
from GPU memory or over the link. transformers' ``batched_mm`` copies the experts of each token
before it multiplies, three times the traffic; its ``grouped_mm`` serves many tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import EXPERT_MULTIPLE, MAX_PAIRS
from offplan.runtime.forms.experts import send
from offplan.runtime.forms.gather import Pairs, sort_pairs
from offplan.runtime.gpu_limits import gpu_limits
from offplan.transformers_private import ExpertsInterface

EXPERTS_NAME = "offplan"
ROWS = 16
"""Pairs of one expert that a program multiplies at a time: more of them read its weight again."""
MAX_BLOCK = 128
"""Rows, and columns, of a weight that a program holds at a time, at most.

Source: the best of 40 combinations on an H200 for 1 to 64 tokens of DeepSeek-V2-Lite. It takes 0.97
to 1.05 of a matrix-vector product's time to read as many bytes (one token: 1.27).
"""


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    expert_of_pair,
    order,
    starts,
    num_out,
    num_in,
    pairs_per_row,
    BY_PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of one expert: times the inputs of all its pairs."""
    slot = tl.program_id(1)
    expert = slot
    if BY_PAIR:
        expert = tl.load(expert_of_pair + slot).to(tl.int32)
    first = tl.load(starts + expert)
    stop = tl.load(starts + expert + 1)
    if BY_PAIR:
        # of the pairs of one expert, the first one's program reads it for all of them
        stop = tl.where(tl.load(order + first) == slot, stop, first)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + (expert.to(tl.int64) * num_out + n[:, None]) * num_in
    for begin in range(first, stop, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        pair = tl.load(order + m, mask=m < stop, other=0)
        columns = x + (pair // pairs_per_row)[None, :] * num_in
        sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in range(0, num_in, BLOCK_K):
            w = tl.load(rows + (start + k)[None, :])
            v = tl.load(columns + (start + k)[:, None])
            sums = tl.dot(w, v, sums)
        where = out + pair[None, :] * num_out + n[:, None]
        tl.store(where, sums.to(out.dtype.element_ty), mask=(m < stop)[None, :])


def forward_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send tokens through their experts, for transformers' experts interface.

    ``hidden_states`` is [tokens, hidden], ``top_k_index`` and ``top_k_weights`` [tokens, k].
    Returns [tokens, hidden]. ``are_plain`` says for which experts this is. Synchronises nothing.
    """
    num_tokens, num_chosen = top_k_index.shape
    if num_tokens * num_chosen > MAX_PAIRS:
        parts = (part.split(MAX_PAIRS // num_chosen) for part in (top_k_index, top_k_weights))
        shares = zip(hidden_states.split(MAX_PAIRS // num_chosen), *parts, strict=True)
        return torch.cat([forward_experts(experts, *share) for share in shares])
    pairs = sort_pairs(top_k_index.reshape(-1), experts.num_experts)

    def multiply_by(name: str, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, getattr(experts, name), pairs, num_tokens * num_chosen // len(x))

    return send(experts, hidden_states, top_k_weights, multiply_by)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: Pairs,
    pairs_per_row: int,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's row of ``x`` by its expert's weight, [experts, out, in].

    ``x`` is [rows, in]; row r serves the ``pairs_per_row`` pairs from r * ``pairs_per_row`` on.
    Returns [pairs, out]: ``into``, if it is given. Its other pairs are left as they are; pairs of
    an expert beyond the last are left out.
    """
    num_experts, num_out, num_in = weight.shape
    num_pairs = pairs[0].numel()
    by_pair = into is None and num_pairs <= num_experts
    out = x.new_empty(num_pairs, num_out) if into is None else into
    shared_bytes, _ = gpu_limits(weight.device.index)
    block_n, block_k, num_stages = choose_blocks(num_out, num_in, weight.itemsize, shared_bytes)
    _multiply[(num_out // block_n, num_pairs if by_pair else num_experts)](
        x.contiguous(), weight, out, *pairs, num_out, num_in, pairs_per_row,
        BY_PAIR=by_pair,
        BLOCK_M=ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        num_stages=num_stages,
    )  # fmt: skip
    return out


def choose_blocks(
    num_out: int, num_in: int, itemsize: int, shared_bytes: int
) -> tuple[int, int, int]:
    """Choose the rows and columns of a weight that a program holds at a time, and its stages.

    A stage takes a tile of the weight and of the inputs; two are the fewest. Source: the tiles to
    which triton 3.9 compiles the kernel. They are as many as stages for compute capability 9.0, one
    less for 8.0, 8.6 and 12.0, and 1.8 for 7.5.
    """
    block_n, block_k = block_size(num_out), block_size(num_in)
    column_bytes = (block_n + ROWS) * itemsize
    while block_k > 16 and 2 * column_bytes * block_k > shared_bytes:
        block_k //= 2
    return block_n, block_k, max(2, min(4, shared_bytes // (column_bytes * block_k) - 1))


def block_size(size: int) -> int:
    """Return the power of two that divides ``size``, at most MAX_BLOCK; 0 for other sizes."""
    block = min(size & -size, MAX_BLOCK)
    return block if block >= EXPERT_MULTIPLE else 0


ExpertsInterface.register(EXPERTS_NAME, forward_experts)
