"""Products that decode weights as they read them, in GPU memory or over the link, and expansion.

A weight, [out, in] for each expert, is stored along its rows in elements of ``PACK`` weights:
codes of 8 bits in bytes, of 4 in words of eight.
"""

import triton
import triton.language as tl

from offplan.runtime.forms.reference import PER_127

_PER_127 = tl.constexpr(PER_127)


@triton.jit
def decode(stored, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what stored bytes stand for as float32, before scales and zeros.

    The bits of a short float are those of a float32 whose exponent has another bias.
    """
    if CODE == "fp8":
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif CODE == "fp8 in software":
        bits = stored.to(tl.int32)
        values = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        values *= 2.0**120
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    elif CODE == "int8":
        values = stored.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(CODE == "uint8")
        values = stored.to(tl.float32)
    return values


@triton.jit
def pair_bits(words, part: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 of words of eight codes: two bfloat16.

    Both are made at once, in the halves of a word. 4-bit floats lack a factor of 2 ** 126, whole
    numbers have 128 too many: their bits are the last ones of 128's mantissa.
    """
    if FORM.code == "fp4":  # signs come to be a bfloat16's first bit, and stay
        both = words << (12 - 4 * part)
        both = (both & -0x7FFF8000) | ((both & 0x70007000) >> 6)
    else:
        both = ((words >> (4 * part)) & 0x000F000F) | 0x43004300
    return both


@triton.jit
def decode_pair(words, part: tl.constexpr, weight, FORM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights number ``part`` and ``part`` + 4 as ``pair_bits`` has them, or of a table.

    They are bfloat16 or, ``WIDE``, float32, whose first half that is. A table is bitsandbytes', of
    float32; the first weight of a byte is in its high half.
    """
    if FORM.code == "table":
        place: tl.constexpr = 4 * (part + 1 - part % 2 * 2)
        low = tl.load(weight.table + ((words >> place) & 0xF))
        high = tl.load(weight.table + ((words >> (16 + place)) & 0xF))
    else:
        both = pair_bits(words, part, FORM)
        if WIDE:
            low = (both << 16).to(tl.float32, bitcast=True)
            high = (both & -65536).to(tl.float32, bitcast=True)
        else:
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
def load_scales(scale, mask, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load scales as float32: floats, FP8, or the powers of two that they are the exponents of."""
    SCALE: tl.constexpr = FORM.scale
    if SCALE == "exponent":
        exponent = tl.load(scale, mask=mask, other=0).to(tl.int32)
        # 2**-127 has the bits of a subnormal number
        scales = tl.maximum(exponent << 23, 0x400000).to(tl.float32, bitcast=True)
    elif SCALE == "float" or SCALE == "largest":
        scales = tl.load(scale, mask=mask, other=0.0).to(tl.float32)
    else:
        scales = decode(tl.load(scale, mask=mask, other=0), SCALE)
    return scales


@triton.jit
def load_whole(weight, FORM: tl.constexpr, expert, num_out, n, is_row):  # type: ignore[no-untyped-def]
    """Load the scale of scales of rows ``n``, that of their matrix."""
    matrix = expert * (num_out // FORM.global_rows) + n // FORM.global_rows
    return tl.load(weight.whole + matrix, mask=is_row, other=1.0)


@triton.jit
def scale_scales(scales, whole, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply or divide scales by that of their matrix, one or one for each of their rows."""
    if FORM.whole == "factor":
        scales *= whole
    elif FORM.whole == "divisor":
        scales = tl.div_rn(scales, tl.broadcast_to(whole, scales.shape))
    return scales


@triton.jit
def load_zeros(weight, FORM: tl.constexpr, n, column, first, mask):  # type: ignore[no-untyped-def]
    """Load the code of zero of rows ``n`` in groups ``column``, as float32.

    ``first`` counts the rows of the experts before.
    """
    BITS: tl.constexpr = 8 if FORM.pack == 1 else 4
    PER: tl.constexpr = 32 // BITS
    if FORM.zero == "middle":
        zeros = tl.full(mask.shape, 1 << (BITS - 1), tl.float32)
    elif FORM.zero == "words":
        word = (first // PER + n // PER) * weight.scale_columns + column
        word = tl.load(weight.zeros + word, mask=mask, other=0)
        zeros = (word >> (BITS * (n % PER))) & ((1 << BITS) - 1)
    else:
        tl.static_assert(FORM.zero == "bytes")
        zeros = tl.load(
            weight.zeros + (first + n) * weight.scale_columns + column, mask=mask, other=0
        )
    return zeros.to(tl.float32)


@triton.jit
def spread(of_groups, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat each column SIZE times."""
    rows: tl.constexpr = of_groups.shape[0]
    columns: tl.constexpr = of_groups.shape[1]
    repeated = tl.broadcast_to(of_groups[:, :, None], [rows, columns, SIZE])
    return tl.reshape(repeated, [rows, columns * SIZE])


@triton.jit
def scaled(w, s, none, dtype: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale weights less zeros, bfloat16, to dtype.

    To 2 ** -63 of their value by exponents to bfloat16.
    """
    if s.dtype == tl.bfloat16 and dtype == tl.bfloat16:
        if FORM.zero != "":
            w -= none
        made = w * s
    elif FORM.scale == "exponent":
        made = (w.to(tl.float32) * s.to(tl.float32) * 2.0**63).to(dtype)
    elif FORM.code == "fp4":
        made = (w.to(tl.float32) * 2.0**126 * s).to(dtype)
    elif FORM.zero != "":  # in one step: both products are exact, of scales of 16 bits
        scales = s.to(tl.float32)
        made = tl.fma(w.to(tl.float32), scales, -none.to(tl.float32) * scales).to(dtype)
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
def find_weight(more, num_out, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block of rows that this program has of one of several weights, and which that is.

    Returns the weight's rows, those of weights before, and how far its codes and scales lie behind
    the first weight's. ``more`` are four numbers of each further weight: its rows, the first of
    its blocks, and the distances. Distances are told, not pointers: a tensor has one, as have
    programs.
    """
    block = tl.program_id(0)
    rows, before, at_codes, at_scales = num_out, 0, tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    total = num_out
    if more is not None:
        own = block
        for i in tl.static_range(len(more) // 4):
            is_own = block >= more[4 * i + 1]
            own = tl.where(is_own, block - more[4 * i + 1], own)
            rows = tl.where(is_own, more[4 * i], rows)
            before = tl.where(is_own, total, before)
            at_codes = tl.where(is_own, more[4 * i + 2], at_codes)
            at_scales = tl.where(is_own, more[4 * i + 3], at_scales)
            total += more[4 * i]
        block = own
    return block * BLOCK_N + tl.arange(0, BLOCK_N), rows, before, total, at_codes, at_scales


@triton.jit
def store_sums(out, sums, pair, n, size, num_out, inside):  # type: ignore[no-untyped-def]
    """Store a program's sums to its part of ``out``, which has ``size`` products."""
    where = pair.to(tl.int64)[None, :] * num_out + n[:, None]
    own = out + tl.program_id(2) * size + where
    tl.store(own, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x, out, order, starts, num_pairs, num_out, row_elements, split_elements,
    pairs_per_row, num_experts, more, weight, FORM: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of a weight and a part of their length: times BLOCK_M inputs."""
    expert, begin, stop_pair = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    if FORM.eights:  # so that loads take 16 bytes each
        row_elements = row_elements // 8 * 8
    n, num_out, before, all_out, at_codes, at_scales = find_weight(more, num_out, BLOCK_N)
    is_row = n < num_out
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < stop_pair
    pair = m
    first_row = n.to(tl.int64)
    if EXPERTS:
        pair = tl.load(order + m, mask=is_pair, other=0)
        first_row += tl.cast(expert, tl.int64) * num_out
    part_elements = num_pairs // pairs_per_row * row_elements
    rows = weight.codes + at_codes + first_row[:, None] * row_elements
    scales = (
        weight.scales
        + at_scales
        + (expert * weight.scale_rows + n // FORM.rows) * weight.scale_columns
    )
    columns = x + (pair // pairs_per_row).to(tl.int64)[None, :] * row_elements
    of_matrix = 1.0
    if FORM.whole != "":
        of_matrix = load_whole(weight, FORM, expert, num_out, n, is_row)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_elements
    stop = tl.minimum(first + split_elements, row_elements)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < stop
        is_input = inside[:, None] & is_pair[None, :]
        stored = tl.load(rows + k[None, :], mask=is_row[:, None] & inside[None, :], other=0)
        if FORM.pack == 1:  # a tile lies under one scale: floats are scaled once multiplied
            column = start // FORM.elements
            CODE: tl.constexpr = FORM.code
            w = decode(stored, CODE)
            if FORM.zero != "":
                w -= load_zeros(weight, FORM, n[:, None], column, expert * num_out, is_row[:, None])
            v = tl.load(columns + k[:, None], mask=is_input, other=0.0)
            s = load_scales(scales + column, is_row, FORM)
            if FORM.scale == "largest":  # of a row, which 127 stands for
                s *= _PER_127
            # libraries round what whole numbers stand for to the scales' type
            if CODE == "int8" or CODE == "uint8":
                w = (w * s[:, None]).to(weight.scales.dtype.element_ty)
                sums = tl.dot(w.to(v.dtype), v, sums)
            else:
                sums += tl.dot(w.to(v.dtype), v) * s[:, None]
        else:
            GROUPS: tl.constexpr = BLOCK_K // FORM.elements if BLOCK_K % FORM.elements == 0 else 1
            SIZE: tl.constexpr = BLOCK_K // GROUPS
            column = (start // FORM.elements + tl.arange(0, GROUPS))[None, :]
            is_scale = is_row[:, None] & (column < weight.scale_columns)
            if FORM.scale == "exponent":
                s = load_powers(scales[:, None] + column, is_scale)
            elif FORM.scale == "float":
                s = tl.load(scales[:, None] + column, mask=is_scale, other=0.0)
            else:
                s = load_scales(scales[:, None] + column, is_scale, FORM)
                s = scale_scales(s, of_matrix, FORM)
            s = spread(s, SIZE)
            none = 0.0
            if FORM.zero != "":
                none = load_zeros(weight, FORM, n[:, None], column, expert * num_out, is_scale)
                none = spread((none + 128).to(tl.bfloat16), SIZE)
            for part in tl.static_range(4):
                low, high = decode_pair(stored, part, weight, FORM, False)
                at = columns + part * part_elements + k[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                sums = tl.dot(scaled(low, s, none, v.dtype, FORM), v, sums)
                v = tl.load(at + 4 * part_elements, mask=is_input, other=0.0)
                sums = tl.dot(scaled(high, s, none, v.dtype, FORM), v, sums)
    if FORM.code == "fp4" and FORM.scale == "exponent" and x.dtype.element_ty == tl.bfloat16:
        sums *= 2.0**63
    inside = is_pair[None, :] & is_row[:, None]
    size = tl.cast(num_pairs, tl.int64) * all_out
    before = tl.cast(num_pairs, tl.int64) * before
    store_sums(out + before, sums, pair, n, size, num_out, inside)


@triton.jit
def add_splits(out, sums, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what programs made of parts of rows, [splits, size], in their order; round it once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sums + at, mask=at < size)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + split * size + at, mask=at < size)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def multiply_each(  # type: ignore[no-untyped-def]
    x, out, order, starts, num_pairs, num_out, row_elements, split_elements,
    pairs_per_row, num_experts, more, weight, FORM: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of a weight in words, times BLOCK_M inputs, one after another.

    Tensor cores want weights laid out anew; for one input, multiplying where they are is faster.
    """
    expert, begin, stop = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    if BLOCK_M == 1:
        _multiply_one(
            x, out, order, begin, expert, num_pairs, num_out, row_elements, pairs_per_row, more,
            weight, FORM, EXPERTS, BLOCK_N, BLOCK_K, 3,
        )  # fmt: skip
    else:  # in host memory: loads ahead by 16 bytes pass the cache of lines that rows share
        for at in range(begin, tl.minimum(begin + BLOCK_M, stop)):
            _multiply_one(
                x, out, order, at, expert, num_pairs, num_out, row_elements, pairs_per_row, more,
                weight, FORM, EXPERTS, BLOCK_N, BLOCK_K, 1,
            )  # fmt: skip


@triton.jit
def _multiply_one(  # type: ignore[no-untyped-def]
    x, out, order, begin, expert, num_pairs, num_out, row_elements, pairs_per_row, more, weight,
    FORM: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply a program's rows by the input of a pair; STAGES of loads are under way at a time."""
    if FORM.eights:  # as above
        row_elements = row_elements // 8 * 8
    n, num_out, before, _all_out, at_codes, at_scales = find_weight(more, num_out, BLOCK_N)
    is_row = n < num_out
    pair = begin
    if EXPERTS:
        pair = tl.load(order + begin)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    part_elements = num_pairs // pairs_per_row * row_elements
    rows = weight.codes + at_codes + first_row[:, None] * row_elements
    scales = (expert * weight.scale_rows + n // FORM.rows)[:, None] * weight.scale_columns
    inputs = x + tl.cast(pair // pairs_per_row, tl.int64) * row_elements
    # half of what 4-bit floats lack: a product of both must be no subnormal number
    FACTOR: tl.constexpr = 2.0**64 if FORM.code == "fp4" else 1.0
    GROUPS: tl.constexpr = BLOCK_K // FORM.elements if BLOCK_K % FORM.elements == 0 else 1
    sums = tl.zeros([BLOCK_N, GROUPS, BLOCK_K // GROUPS], dtype=tl.float32)
    for start in tl.range(0, row_elements, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < row_elements
        is_word = is_row[:, None] & inside[None, :]
        words = tl.load(rows + k[None, :], mask=is_word, other=0)
        found = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        total = tl.zeros([1, BLOCK_K], dtype=tl.float32)
        for part in tl.static_range(4):
            low, high = decode_pair(words, part, weight, FORM, True)
            at = inputs + part * part_elements + k
            v = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :] * FACTOR
            found += low * v
            total += v
            v = tl.load(at + 4 * part_elements, mask=inside, other=0.0).to(tl.float32)[None, :]
            v *= FACTOR
            found += high * v
            total += v
        # scales and zeros are loaded once a group
        column = (start // FORM.elements + tl.arange(0, GROUPS))[None, :]
        is_scale = is_row[:, None] & (column < weight.scale_columns)
        s = load_scales(weight.scales + at_scales + scales + column, is_scale, FORM)
        found = tl.reshape(found, [BLOCK_N, GROUPS, BLOCK_K // GROUPS])
        if FORM.zero != "":
            none = load_zeros(weight, FORM, n[:, None], column, expert * num_out, is_scale)
            found -= (none + 128)[:, :, None] * tl.reshape(total, [1, GROUPS, BLOCK_K // GROUPS])
        if FORM.code == "fp4":
            found *= 2.0**62
        sums += found * s[:, :, None]
    product = tl.sum(tl.sum(sums, 2), 1)
    if FORM.whole != "":
        of_matrix = load_whole(weight, FORM, expert, num_out, n, is_row)
        product = product * of_matrix if FORM.whole == "factor" else product / of_matrix
    before = tl.cast(num_pairs, tl.int64) * before
    where = out + before + tl.cast(pair, tl.int64) * num_out + n
    tl.store(where, product.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    out, num_out, row_elements, weight, FORM: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for a tile of a weight in bytes: writes its values in the type of ``out``.

    Each thread has CHUNK elements in a row, under one scale.
    """
    CODE: tl.constexpr = FORM.code
    expert = tl.program_id(2)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    begins = ((tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)) * CHUNK)[None, :]
    k = begins[:, :, None] + tl.arange(0, CHUNK)[None, None, :]
    inside = (n < num_out)[:, :, None] & (k < row_elements)
    at = (n + expert.to(tl.int64) * num_out)[:, :, None] * row_elements + k
    stored = tl.load(weight.codes + at, mask=inside, other=0)
    s, none = load_factors(weight, FORM, expert, num_out, n, begins, row_elements)
    values = decode(stored, CODE)
    if FORM.zero != "":
        values -= none[:, :, None]
    tl.store(out + at, finish(values, s[:, :, None], weight, out, FORM), mask=inside)


@triton.jit
def expand_words(  # type: ignore[no-untyped-def]
    out, num_out, row_elements, weight, FORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for a tile of a weight in words, as many as threads, each of which has one.

    The tile is flat: of two dimensions, threads would exchange what they hold.
    """
    expert = tl.program_id(2)
    word = tl.arange(0, BLOCK_N * BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + word // BLOCK_K
    k = tl.program_id(1) * BLOCK_K + word % BLOCK_K
    first_row = expert.to(tl.int64) * num_out
    inside = (n < num_out) & (k < row_elements)
    words = tl.load(weight.codes + (first_row + n) * row_elements + k, mask=inside, other=0)
    s, none = load_factors(weight, FORM, expert, num_out, n, k, row_elements)
    if FORM.zero != "":
        none += 128
    values = expand_all(words, s, none, weight, out, FORM)
    value = tl.arange(0, 8 * BLOCK_N * BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + value // (8 * BLOCK_K)
    k = tl.program_id(1) * (8 * BLOCK_K) + value % (8 * BLOCK_K)
    inside = (n < num_out) & (k < 8 * row_elements)
    tl.store(out + (first_row + n) * (8 * row_elements) + k, values, mask=inside)


@triton.jit
def expand_flat(out, num_words, weight, FORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for four blocks of a weight's words, whose groups are as many words each.

    It loads all of them before it stores, so that more bytes are on their way. Rows do not matter.
    """
    first = tl.program_id(0).to(tl.int64) * (4 * BLOCK)
    num_words -= first
    weight_words, scales = weight.codes + first, weight.scales + first // FORM.elements
    a, of_a = load_flat(weight_words, scales, 0, num_words, FORM, BLOCK)
    b, of_b = load_flat(weight_words, scales, BLOCK, num_words, FORM, BLOCK)
    c, of_c = load_flat(weight_words, scales, 2 * BLOCK, num_words, FORM, BLOCK)
    d, of_d = load_flat(weight_words, scales, 3 * BLOCK, num_words, FORM, BLOCK)
    none: tl.constexpr = 128 + 8 if FORM.zero == "middle" else 0
    value = tl.arange(0, 8 * BLOCK)
    out += 8 * first
    values = expand_all(a, of_a, none, weight, out, FORM)
    tl.store(out + value, values, mask=value < 8 * num_words)
    value += 8 * BLOCK
    values = expand_all(b, of_b, none, weight, out, FORM)
    tl.store(out + value, values, mask=value < 8 * num_words)
    value += 8 * BLOCK
    values = expand_all(c, of_c, none, weight, out, FORM)
    tl.store(out + value, values, mask=value < 8 * num_words)
    value += 8 * BLOCK
    values = expand_all(d, of_d, none, weight, out, FORM)
    tl.store(out + value, values, mask=value < 8 * num_words)


@triton.jit
def load_flat(codes, scales, begin, num_words, FORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a block of words and their scales."""
    word = begin + tl.arange(0, BLOCK)
    words = tl.load(codes + word, mask=word < num_words, other=0)
    return words, load_scales(scales + word // FORM.elements, word < num_words, FORM)


@triton.jit
def expand_all(words, s, none, weight, out, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of words, a flat block, in their order."""
    a, e = expand_pair(words, 0, s, none, weight, out, FORM)
    b, f = expand_pair(words, 1, s, none, weight, out, FORM)
    c, g = expand_pair(words, 2, s, none, weight, out, FORM)
    d, h = expand_pair(words, 3, s, none, weight, out, FORM)
    of_even = tl.join(tl.join(a, e), tl.join(c, g))
    values = tl.join(of_even, tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(values, [8 * words.shape[0]])


@triton.jit
def load_factors(weight, FORM: tl.constexpr, expert, num_out, n, k, row_elements):  # type: ignore[no-untyped-def]
    """Load the scales and zeros of elements ``k`` of rows ``n`` as float32."""
    is_row = n < num_out
    mask = is_row & (k < row_elements)
    column = k // FORM.elements
    at = (expert * weight.scale_rows + n // FORM.rows) * weight.scale_columns + column
    s = load_scales(weight.scales + at, mask, FORM)
    if FORM.whole != "":
        s = scale_scales(s, load_whole(weight, FORM, expert, num_out, n, is_row), FORM)
    none = 0.0
    if FORM.zero != "":
        none = load_zeros(weight, FORM, n, column, expert * num_out, mask)
    return s, none


@triton.jit
def expand_pair(words, part: tl.constexpr, s, none, weight, out, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values, as ``out`` has them, of the weights that ``decode_pair`` makes."""
    low, high = decode_pair(words, part, weight, FORM, True)
    if FORM.code == "fp4":
        low *= 2.0**126
        high *= 2.0**126
    if FORM.zero != "":
        low -= none
        high -= none
    return finish(low, s, weight, out, FORM), finish(high, s, weight, out, FORM)


@triton.jit
def finish(values, s, weight, out, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale what codes stand for, and round it as libraries do: to the type of ``out`` at last."""
    values *= s
    if FORM.scale == "largest":  # of a row, which 127 stands for
        values *= _PER_127
    if FORM.zero != "" or FORM.code == "int8":  # libraries compute in the scales' type
        values = values.to(weight.scales.dtype.element_ty)
    return values.to(out.dtype.element_ty)
