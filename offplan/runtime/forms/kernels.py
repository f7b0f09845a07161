"""Products that decode weights as they read them, in GPU memory or over the link, and expansion.

A weight, [out, in] for each expert, is stored in elements of ``PACK`` weights along its rows: FP8
in bytes, codes of four bits in words of eight or, to be expanded, in bytes of two.
"""

import triton
import triton.language as tl


@triton.jit
def decode(stored, part: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weight number ``part`` of each stored byte as float32, before scales and zeros.

    The bits of a short float are those of a float32 whose exponent has another bias.
    """
    if CODE == "fp8":
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif CODE == "fp8 in software":
        bits = stored.to(tl.int32)
        values = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        values *= 2.0**120
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    elif CODE == "fp4":
        bits = stored.to(tl.int32) >> (4 * part)
        values = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
        values *= 2.0**126
    else:
        values = ((stored.to(tl.int32) >> (4 * part)) & 0xF).to(tl.float32)
    return values


@triton.jit
def decode_pair(words, part: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 of words of eight codes, as bfloat16.

    Both are made at once, in the halves of a word. 4-bit floats lack a factor of 2 ** 126, whole
    numbers have 128 too many: their bits are the last ones of 128's mantissa.
    """
    both = words >> (4 * part)
    if CODE == "fp4":
        both = ((both & 0x00080008) << 12) | ((both & 0x00070007) << 6)
    else:
        both = (both & 0x000F000F) | 0x43004300
    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def load_powers(exponent, mask):  # type: ignore[no-untyped-def]
    """Load exponents of two as the bfloat16 that brings 4-bit floats to 2 ** -63 of their value.

    No more: the product of both factors would be beyond the largest number.
    """
    biased = tl.load(exponent, mask=mask, other=0).to(tl.int16) + 63
    return (biased << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(scale, mask, IS_EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load scales as float32, or the powers of two that they are the exponents of."""
    if IS_EXPONENT:
        exponent = tl.load(scale, mask=mask, other=0).to(tl.int32)
        # 2**-127 has the bits of a subnormal number
        scales = tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        scales = tl.load(scale, mask=mask, other=0.0).to(tl.float32)
    return scales


@triton.jit
def spread(of_groups, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat each column SIZE times."""
    rows: tl.constexpr = of_groups.shape[0]
    columns: tl.constexpr = of_groups.shape[1]
    repeated = tl.broadcast_to(of_groups[:, :, None], [rows, columns, SIZE])
    return tl.reshape(repeated, [rows, columns * SIZE])


@triton.jit
def scaled(w, s, dtype: tl.constexpr, IS_EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale weights, bfloat16, to dtype; to 2 ** -63 of their value by exponents to bfloat16."""
    if s.dtype == tl.bfloat16 and dtype == tl.bfloat16:
        made = w * s
    elif IS_EXPONENT:
        made = (w.to(tl.float32) * s.to(tl.float32) * 2.0**63).to(dtype)
    else:
        made = (w.to(tl.float32) * s.to(tl.float32)).to(dtype)
    return made


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    zero,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    row_elements,
    split_elements,
    pairs_per_row,
    scale_rows,
    scale_columns,
    num_experts,
    CODE: tl.constexpr,
    PACK: tl.constexpr,
    IS_EXPONENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_ELEMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of a weight and a part of their length: times BLOCK_M inputs."""
    expert = 0
    begin = tl.program_id(1) * BLOCK_M
    stop_pair = num_pairs
    if EXPERTS:
        # blocks of pairs, expert by expert; more programs are started than there may be blocks
        e = tl.arange(0, EXPERTS)
        firsts = tl.load(starts + e, mask=e < num_experts, other=0)
        stops = tl.load(starts + e + 1, mask=e < num_experts, other=0)
        num_blocks = (stops - firsts + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(num_blocks, 0)
        expert = tl.sum((ends <= tl.program_id(1)).to(tl.int32), 0)
        if expert >= num_experts:
            return
        own = e == expert
        begin = tl.program_id(1) - tl.sum(tl.where(own, ends - num_blocks, 0), 0)
        begin = tl.sum(tl.where(own, firsts, 0), 0) + begin * BLOCK_M
        stop_pair = tl.sum(tl.where(own, stops, 0), 0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < num_out
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < stop_pair
    pair = m
    first_row = n.to(tl.int64)
    if EXPERTS:
        pair = tl.load(order + m, mask=is_pair, other=0)
        first_row += tl.cast(expert, tl.int64) * num_out
    part_elements = num_pairs // pairs_per_row * row_elements
    rows = weight + first_row[:, None] * row_elements
    scales = scale + (expert * scale_rows + n // SCALE_ROWS) * scale_columns
    columns = x + (pair // pairs_per_row).to(tl.int64)[None, :] * row_elements
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_elements
    stop = tl.minimum(first + split_elements, row_elements)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < stop
        is_input = inside[:, None] & is_pair[None, :]
        stored = tl.load(rows + k[None, :], mask=is_row[:, None] & inside[None, :], other=0)
        if PACK == 1:  # a tile lies under one scale: it is scaled once it is multiplied
            v = tl.load(columns + k[:, None], mask=is_input, other=0.0)
            found = tl.dot(decode(stored, 0, CODE).to(v.dtype), v)
            found *= load_scales(scales + start // SCALE_ELEMENTS, is_row, IS_EXPONENT)[:, None]
            sums += found
        else:
            column = start // SCALE_ELEMENTS + tl.arange(0, BLOCK_K // SCALE_ELEMENTS)
            is_scale = is_row[:, None] & (column < scale_columns)[None, :]
            if IS_EXPONENT:
                s = load_powers(scales[:, None] + column[None, :], is_scale)
            else:
                s = tl.load(scales[:, None] + column[None, :], mask=is_scale, other=0.0)
            none = tl.full([1, 1], 136.0, tl.bfloat16)
            if ZERO == 2:
                words = (expert * (num_out // 8) + n // 8)[:, None] * scale_columns
                words = tl.load(zero + words + column[None, :], mask=is_scale, other=0)
                nibble = (words >> (4 * (n % 8))[:, None]) & 0xF
                none = spread((nibble + 128).to(tl.float32).to(tl.bfloat16), SCALE_ELEMENTS)
            s = spread(s, SCALE_ELEMENTS)
            for part in tl.static_range(4):
                low, high = decode_pair(stored, part, CODE)
                if ZERO:
                    low -= none
                    high -= none
                at = columns + part * part_elements + k[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                sums = tl.dot(scaled(low, s, v.dtype, IS_EXPONENT), v, sums)
                v = tl.load(at + 4 * part_elements, mask=is_input, other=0.0)
                sums = tl.dot(scaled(high, s, v.dtype, IS_EXPONENT), v, sums)
    if IS_EXPONENT and x.dtype.element_ty == tl.bfloat16:
        sums *= 2.0**63
    where = out + (tl.program_id(2) * num_pairs + pair).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & is_row[:, None])


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    weight,
    scale,
    zero,
    out,
    num_out,
    row_elements,
    scale_rows,
    scale_columns,
    CODE: tl.constexpr,
    PACK: tl.constexpr,
    IS_EXPONENT: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_ELEMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for a tile of a weight: writes its values in the type of ``out``.

    Each thread has CHUNK elements in a row, under one scale.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < num_out
    begins = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)) * CHUNK
    k = begins[None, :, None] + tl.arange(0, CHUNK)[None, None, :]
    inside = is_row[:, None, None] & (k < row_elements)
    row = (n + tl.program_id(2).to(tl.int64) * num_out)[:, None, None]
    stored = tl.load(weight + row * row_elements + k, mask=inside, other=0)
    column = begins // SCALE_ELEMENTS
    scales = scale + (tl.program_id(2) * scale_rows + n // SCALE_ROWS)[:, None] * scale_columns
    is_scale = is_row[:, None] & (begins < row_elements)[None, :]
    s = load_scales(scales + column[None, :], is_scale, IS_EXPONENT)[:, :, None]
    at = out + (row * row_elements + k) * PACK
    none = 0.0
    if ZERO == 1:
        none = 8.0
    elif ZERO == 2:
        words = tl.program_id(2) * (num_out // 8) + n // 8
        word = zero + words[:, None] * scale_columns + column[None, :]
        nibbles = tl.load(word, mask=is_scale, other=0) >> (4 * (n % 8))[:, None]
        none = (nibbles & 0xF).to(tl.float32)[:, :, None]
    first = (decode(stored, 0, CODE) - none) * s
    second = (decode(stored, PACK - 1, CODE) - none) * s
    if ZERO:  # libraries compute in the scales' type
        first = first.to(scale.dtype.element_ty)
        second = second.to(scale.dtype.element_ty)
    if PACK == 1:
        tl.store(at, first.to(out.dtype.element_ty), mask=inside)
    else:
        both = tl.join(first.to(out.dtype.element_ty), second.to(out.dtype.element_ty))
        where = at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
        tl.store(where, both, mask=inside[:, :, :, None])
