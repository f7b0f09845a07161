"""Products that decode weights as they read them, in GPU memory or over the link, and expansion.

A weight, [out, in] for each expert, is stored along its rows in elements of ``PACK`` weights:
codes of ``BITS`` 8 in bytes, of 4 in words of eight or, to be expanded, in bytes of two.
"""

import triton
import triton.language as tl

from offplan.runtime.forms.reference import PER_127

_PER_127 = tl.constexpr(PER_127)


@triton.jit
def decode(stored, part: tl.constexpr, table, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
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
    elif CODE == "table":  # of bitsandbytes, whose first weight is in the high half
        values = tl.load(table + ((stored.to(tl.int32) >> (4 - 4 * part)) & 0xF))
    elif CODE == "uint4":
        values = ((stored.to(tl.int32) >> (4 * part)) & 0xF).to(tl.float32)
    elif CODE == "int8":
        values = stored.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(CODE == "uint8")
        values = stored.to(tl.float32)
    return values


@triton.jit
def pair_bits(words, part: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 of words of eight codes: two bfloat16.

    Both are made at once, in the halves of a word. 4-bit floats lack a factor of 2 ** 126, whole
    numbers have 128 too many: their bits are the last ones of 128's mantissa.
    """
    both = words >> (4 * part)
    if CODE == "fp4":
        both = ((both & 0x00080008) << 12) | ((both & 0x00070007) << 6)
    else:
        both = (both & 0x000F000F) | 0x43004300
    return both


@triton.jit
def look_up_pair(words, part: tl.constexpr, table):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 of words of eight codes from a table.

    It is bitsandbytes', of float32; the first weight of a byte is in its high half.
    """
    place: tl.constexpr = 4 * (part + 1 - part % 2 * 2)
    return tl.load(table + ((words >> place) & 0xF)), tl.load(
        table + ((words >> (16 + place)) & 0xF)
    )


@triton.jit
def decode_pair(words, part: tl.constexpr, table, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 as ``pair_bits`` has them, or of a table."""
    if CODE == "table":
        low, high = look_up_pair(words, part, table)
    else:
        both = pair_bits(words, part, CODE)
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def decode_wide(words, part: tl.constexpr, table, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do the same in float32, whose first half a bfloat16 is."""
    if CODE == "table":
        low, high = look_up_pair(words, part, table)
    else:
        both = pair_bits(words, part, CODE)
        low = (both << 16).to(tl.float32, bitcast=True)
        high = (both & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def load_powers(exponent, mask):  # type: ignore[no-untyped-def]
    """Load exponents of two as the bfloat16 that brings 4-bit floats to 2 ** -63 of their value.

    No more: the product of both factors would be beyond the largest number.
    """
    biased = tl.load(exponent, mask=mask, other=0).to(tl.int16) + 63
    return (biased << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(scale, mask, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load scales as float32: floats, FP8, or the powers of two that they are the exponents of."""
    if SCALE == "exponent":
        exponent = tl.load(scale, mask=mask, other=0).to(tl.int32)
        # 2**-127 has the bits of a subnormal number
        scales = tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)
    elif SCALE == "float" or SCALE == "largest":
        scales = tl.load(scale, mask=mask, other=0.0).to(tl.float32)
    else:
        scales = decode(tl.load(scale, mask=mask, other=0), 0, None, SCALE)
    return scales


@triton.jit
def scale_scales(scales, whole, GLOBAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply or divide scales, [rows, columns], by that of their matrix, [rows]."""
    if GLOBAL == "factor":
        scales *= whole[:, None]
    elif GLOBAL == "divisor":
        scales = tl.div_rn(scales, tl.broadcast_to(whole[:, None], scales.shape))
    return scales


@triton.jit
def load_zeros(zero, n, column, first, columns, mask, ZERO: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the code of zero of rows ``n`` in groups ``column``, as float32.

    ``first`` counts the rows of the experts before, ``columns`` the groups of a row.
    """
    if ZERO == "words":
        PER: tl.constexpr = 32 // BITS
        word = tl.load(zero + (first // PER + n // PER) * columns + column, mask=mask, other=0)
        zeros = (word >> (BITS * (n % PER))) & ((1 << BITS) - 1)
    else:
        tl.static_assert(ZERO == "bytes")
        zeros = tl.load(zero + (first + n) * columns + column, mask=mask, other=0)
    return zeros.to(tl.float32)


@triton.jit
def spread(of_groups, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat each column SIZE times."""
    rows: tl.constexpr = of_groups.shape[0]
    columns: tl.constexpr = of_groups.shape[1]
    repeated = tl.broadcast_to(of_groups[:, :, None], [rows, columns, SIZE])
    return tl.reshape(repeated, [rows, columns * SIZE])


@triton.jit
def scaled(w, s, dtype: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale weights, bfloat16, to dtype; to 2 ** -63 of their value by exponents to bfloat16."""
    if s.dtype == tl.bfloat16 and dtype == tl.bfloat16:
        made = w * s
    elif SCALE == "exponent":
        made = (w.to(tl.float32) * s.to(tl.float32) * 2.0**63).to(dtype)
    elif CODE == "fp4":
        made = (w.to(tl.float32) * 2.0**126 * s).to(dtype)
    else:
        made = (w.to(tl.float32) * s.to(tl.float32)).to(dtype)
    return made


@triton.jit
def find_block(starts, num_pairs, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the expert of this program, where its pairs begin, and where that expert's end.

    Pairs are taken in blocks, expert by expert; more programs are started than there may be blocks.
    """
    expert = 0
    begin = tl.program_id(1) * BLOCK_M
    stop = num_pairs
    if EXPERTS:
        e = tl.arange(0, EXPERTS)
        firsts = tl.load(starts + e, mask=e < num_experts, other=0)
        stops = tl.load(starts + e + 1, mask=e < num_experts, other=0)
        num_blocks = (stops - firsts + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(num_blocks, 0)
        expert = tl.sum((ends <= tl.program_id(1)).to(tl.int32), 0)
        own = e == expert
        begin = tl.program_id(1) - tl.sum(tl.where(own, ends - num_blocks, 0), 0)
        begin = tl.sum(tl.where(own, firsts, 0), 0) + begin * BLOCK_M
        stop = tl.sum(tl.where(own, stops, 0), 0)
    return expert, begin, stop


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    row_elements,
    split_elements,
    pairs_per_row,
    num_experts,
    weight,
    scale,
    zero,
    whole,
    table,
    scale_rows,
    scale_columns,
    CODE: tl.constexpr,
    PACK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    GLOBAL: tl.constexpr,
    GLOBAL_ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_ELEMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of a weight and a part of their length: times BLOCK_M inputs."""
    expert, begin, stop_pair = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
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
    of_matrix = 1.0
    if GLOBAL != "":
        matrix = expert * (num_out // GLOBAL_ROWS) + n // GLOBAL_ROWS
        of_matrix = tl.load(whole + matrix, mask=is_row, other=1.0)
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_elements
    stop = tl.minimum(first + split_elements, row_elements)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < stop
        is_input = inside[:, None] & is_pair[None, :]
        stored = tl.load(rows + k[None, :], mask=is_row[:, None] & inside[None, :], other=0)
        if PACK == 1:  # a tile lies under one scale: floats are scaled once they are multiplied
            column = start // SCALE_ELEMENTS
            w = decode(stored, 0, table, CODE)
            if ZERO == "middle":
                w -= 128.0
            elif ZERO != "":
                before = expert * num_out
                none = load_zeros(zero, n, column, before, scale_columns, is_row, ZERO, BITS)
                w -= none[:, None]
            v = tl.load(columns + k[:, None], mask=is_input, other=0.0)
            s = load_scales(scales + column, is_row, SCALE)
            if SCALE == "largest":  # of a row, which 127 stands for
                s *= _PER_127
            if (
                CODE == "int8" or CODE == "uint8"
            ):  # libraries round their values to the scales' type
                w = (w * s[:, None]).to(scale.dtype.element_ty)
                sums = tl.dot(w.to(v.dtype), v, sums)
            else:
                sums += tl.dot(w.to(v.dtype), v) * s[:, None]
        else:
            GROUPS: tl.constexpr = BLOCK_K // SCALE_ELEMENTS if BLOCK_K > SCALE_ELEMENTS else 1
            column = start // SCALE_ELEMENTS + tl.arange(0, GROUPS)
            is_scale = is_row[:, None] & (column < scale_columns)[None, :]
            if SCALE == "exponent":
                s = load_powers(scales[:, None] + column[None, :], is_scale)
            elif SCALE == "float":
                s = tl.load(scales[:, None] + column[None, :], mask=is_scale, other=0.0)
            else:
                s = load_scales(scales[:, None] + column[None, :], is_scale, SCALE)
                s = scale_scales(s, of_matrix, GLOBAL)
            s = spread(s, BLOCK_K // GROUPS)
            none = tl.full([1, 1], 136.0, tl.float32).to(tl.bfloat16)
            if ZERO == "words":
                nibble = load_zeros(
                    zero, n[:, None], column[None, :], expert * num_out, scale_columns, is_scale,
                    ZERO, BITS,
                )  # fmt: skip
                none = spread((nibble + 128).to(tl.bfloat16), BLOCK_K // GROUPS)
            for part in tl.static_range(4):
                low, high = decode_pair(stored, part, table, CODE)
                if ZERO != "":
                    low -= none
                    high -= none
                at = columns + part * part_elements + k[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                sums = tl.dot(scaled(low, s, v.dtype, CODE, SCALE), v, sums)
                v = tl.load(at + 4 * part_elements, mask=is_input, other=0.0)
                sums = tl.dot(scaled(high, s, v.dtype, CODE, SCALE), v, sums)
    if SCALE == "exponent" and x.dtype.element_ty == tl.bfloat16:
        sums *= 2.0**63
    where = out + (tl.program_id(2) * num_pairs + pair).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_pair[None, :] & is_row[:, None])


@triton.jit
def multiply_each(  # type: ignore[no-untyped-def]
    x,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    row_elements,
    split_elements,
    pairs_per_row,
    num_experts,
    weight,
    scale,
    zero,
    whole,
    table,
    scale_rows,
    scale_columns,
    CODE: tl.constexpr,
    PACK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    GLOBAL: tl.constexpr,
    GLOBAL_ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_ELEMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of a weight in words, times one input.

    Tensor cores want weights laid out anew; for one input, multiplying where they are is faster.
    """
    expert, begin, _ = find_block(starts, num_pairs, num_experts, EXPERTS, 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < num_out
    pair = begin
    if EXPERTS:
        pair = tl.load(order + begin)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    part_elements = num_pairs // pairs_per_row * row_elements
    rows = weight + first_row[:, None] * row_elements
    scales = scale + (expert * scale_rows + n // SCALE_ROWS)[:, None] * scale_columns
    inputs = x + tl.cast(pair // pairs_per_row, tl.int64) * row_elements
    # half of what 4-bit floats lack: a product of both must be no subnormal number
    FACTOR: tl.constexpr = 2.0**64 if CODE == "fp4" else 1.0
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, row_elements, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < row_elements
        is_word = is_row[:, None] & inside[None, :]
        words = tl.load(rows + k[None, :], mask=is_word, other=0)
        column = (k // SCALE_ELEMENTS)[None, :]
        s = load_scales(scales + column, is_word, SCALE)
        none = 136.0 if ZERO == "middle" else 0.0
        if ZERO == "words":
            none = 128 + load_zeros(
                zero, n[:, None], column, expert * num_out, scale_columns, is_word, ZERO, BITS
            )
        found = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for part in tl.static_range(4):
            low, high = decode_wide(words, part, table, CODE)
            at = inputs + part * part_elements + k
            v = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
            found += (low - none) * (v * FACTOR)
            v = tl.load(at + 4 * part_elements, mask=inside, other=0.0).to(tl.float32)[None, :]
            found += (high - none) * (v * FACTOR)
        if CODE == "fp4":
            found *= 2.0**62
        sums += found * s
    made = tl.sum(sums, 1)
    if GLOBAL != "":
        matrix = expert * (num_out // GLOBAL_ROWS) + n // GLOBAL_ROWS
        of_matrix = tl.load(whole + matrix, mask=is_row, other=1.0)
        made = made * of_matrix if GLOBAL == "factor" else made / of_matrix
    where = out + tl.cast(pair, tl.int64) * num_out + n
    tl.store(where, made.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    out,
    num_out,
    row_elements,
    weight,
    scale,
    zero,
    whole,
    table,
    scale_rows,
    scale_columns,
    CODE: tl.constexpr,
    PACK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    GLOBAL: tl.constexpr,
    GLOBAL_ROWS: tl.constexpr,
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
    s = load_scales(scales + column[None, :], is_scale, SCALE)
    if GLOBAL != "":
        matrix = tl.program_id(2) * (num_out // GLOBAL_ROWS) + n // GLOBAL_ROWS
        s = scale_scales(s, tl.load(whole + matrix, mask=is_row, other=1.0), GLOBAL)
    s = s[:, :, None]
    at = out + (row * row_elements + k) * PACK
    none = 0.0
    if ZERO == "middle":
        none = 8.0 if BITS == 4 else 128.0
    elif ZERO != "":
        before = tl.program_id(2) * num_out
        none = load_zeros(
            zero, n[:, None], column[None, :], before, scale_columns, is_scale, ZERO, BITS
        )[:, :, None]
    first = (decode(stored, 0, table, CODE) - none) * s
    second = (decode(stored, PACK - 1, table, CODE) - none) * s
    if SCALE == "largest":  # of a row, which 127 stands for
        first *= _PER_127
        second *= _PER_127
    if ZERO != "" or CODE == "int8":  # libraries compute in the scales' type
        first = first.to(scale.dtype.element_ty)
        second = second.to(scale.dtype.element_ty)
    if PACK == 1:
        tl.store(at, first.to(out.dtype.element_ty), mask=inside)
    else:
        both = tl.join(first.to(out.dtype.element_ty), second.to(out.dtype.element_ty))
        where = at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
        tl.store(where, both, mask=inside[:, :, :, None])
