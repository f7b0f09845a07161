"""Products and expansion of weights whose codes are stored in words along columns, [in, out].

GPTQ packs words along the inputs, AWQ along the outputs. Each word is read once by a program.
"""

import triton
import triton.language as tl

from offplan.runtime.forms.kernels import find_block


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    weight,
    scale,
    zero,
    index,
    first_k,
    first_n,
    num_in,
    num_out,
    num_groups,
    BITS: tl.constexpr,
    PACKING: tl.constexpr,
    GROUP: tl.constexpr,
    ONES: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the values of a tile of one matrix, [BLOCK_K, BLOCK_N], in the scales' type."""
    PER: tl.constexpr = 32 // BITS
    k = first_k + tl.arange(0, BLOCK_K)
    n = first_n + tl.arange(0, BLOCK_N)
    inside = (k < num_in)[:, None] & (n < num_out)[None, :]
    at = tl.arange(0, PER)
    if PACKING == "awq":
        w = first_n // PER + tl.arange(0, BLOCK_N // PER)
        is_word = (k < num_in)[:, None] & (w < num_out // PER)[None, :]
        words = tl.load(weight + k[:, None] * (num_out // PER) + w[None, :], is_word, other=0)
        # columns 0 to 7 of a word are its nibbles 0 4 1 5 2 6 3 7
        codes = words[:, :, None] >> (BITS * (at % 2 * 4 + at // 2))[None, None, :]
        shift = BITS * (n % 2 * 4 + n % PER // 2)
    else:
        w = first_k // PER + tl.arange(0, BLOCK_K // PER)
        is_word = (w < num_in // PER)[:, None] & (n < num_out)[None, :]
        words = tl.load(weight + w[:, None] * num_out + n[None, :], is_word, other=0)
        codes = words[:, None, :] >> (BITS * at)[None, :, None]
        shift = BITS * (n % PER)
    codes = tl.reshape(codes, [BLOCK_K, BLOCK_N]) & ((1 << BITS) - 1)
    if INDEX_ROWS == 0 and GROUP % BLOCK_K == 0:  # the tile lies in one group
        group = (first_k // GROUP + tl.arange(0, 1))[:, None]
        inside = (n < num_out)[None, :]
    elif INDEX_ROWS == 0:
        group = (k // GROUP)[:, None]
    else:
        group = tl.load(index + k, mask=k < num_in, other=0)
        # a pass that only allocates may find a slot of the ring not yet filled
        group = tl.minimum(tl.maximum(group, 0), num_groups - 1)[:, None]
    s = tl.load(scale + group * num_out + n[None, :], mask=inside, other=0.0)
    zeros = tl.load(zero + group * (num_out // PER) + (n // PER)[None, :], mask=inside, other=0)
    if PACKING == "gptq":  # stored less one
        zeros += ONES
    zeros = (zeros >> shift[None, :]) & ((1 << BITS) - 1)
    return ((codes - zeros).to(tl.float32) * s.to(tl.float32)).to(s.dtype)


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    num_in,
    split_elements,
    pairs_per_row,
    num_experts,
    weight,
    scale,
    zero,
    index,
    num_groups,
    BITS: tl.constexpr,
    PACKING: tl.constexpr,
    GROUP: tl.constexpr,
    ONES: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N outputs of a weight and a part of its inputs: BLOCK_M products.

    A block of outputs has one group index: where matrices are joined, it lies in one of them.
    """
    expert, begin, stop_pair = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    first_n = tl.program_id(0) * BLOCK_N
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < stop_pair
    pair = m
    if EXPERTS:
        pair = tl.load(order + m, mask=is_pair, other=0)
        before = tl.cast(expert, tl.int64) * num_out
        weight += before * num_in // (32 // BITS)
        scale += before * num_groups
        zero += before * num_groups // (32 // BITS)
    if INDEX_ROWS != 0:
        index += (expert * (num_out // INDEX_ROWS) + first_n // INDEX_ROWS) * num_in
    rows = x + (pair // pairs_per_row).to(tl.int64)[:, None] * num_in
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(2) * split_elements
    for start in range(first, tl.minimum(first + split_elements, num_in), BLOCK_K):
        w = load_tile(
            weight, scale, zero, index, start, first_n, num_in, num_out, num_groups,
            BITS, PACKING, GROUP, ONES, INDEX_ROWS, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        k = start + tl.arange(0, BLOCK_K)
        v = tl.load(rows + k[None, :], mask=is_pair[:, None] & (k < num_in)[None, :], other=0.0)
        sums = tl.dot(v, w.to(v.dtype), sums)
    n = first_n + tl.arange(0, BLOCK_N)
    where = out + (tl.program_id(2) * num_pairs + pair).to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & (n < num_out)[None, :])


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    out,
    num_out,
    num_in,
    weight,
    scale,
    zero,
    index,
    num_groups,
    BITS: tl.constexpr,
    PACKING: tl.constexpr,
    GROUP: tl.constexpr,
    ONES: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for a tile of a weight: writes its values, [in, out], in the type of ``out``."""
    first_n, first_k = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    before = tl.program_id(2).to(tl.int64) * num_out
    weight += before * num_in // (32 // BITS)
    scale += before * num_groups
    zero += before * num_groups // (32 // BITS)
    if INDEX_ROWS != 0:
        index += (tl.program_id(2) * (num_out // INDEX_ROWS) + first_n // INDEX_ROWS) * num_in
    values = load_tile(
        weight, scale, zero, index, first_k, first_n, num_in, num_out, num_groups,
        BITS, PACKING, GROUP, ONES, INDEX_ROWS, BLOCK_K, BLOCK_N,
    )  # fmt: skip
    k = first_k + tl.arange(0, BLOCK_K)
    n = first_n + tl.arange(0, BLOCK_N)
    where = out + before * num_in + k[:, None] * num_out + n[None, :]
    inside = (k < num_in)[:, None] & (n < num_out)[None, :]
    tl.store(where, values.to(out.dtype.element_ty), mask=inside)
