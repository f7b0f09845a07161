"""Products and expansion of bfloat16 weights that are packed without loss.

A word of EXPONENT, four bytes, and the words of WEIGHT of both halves of a row make eight weights
at once. Bytes 0 and 2 of a word have two weights in a row, bytes 1 and 3 two others in a row. Rows
come in whole blocks of 64.
"""

import triton
import triton.language as tl

from offplan.forms.form import BASE_BYTES, PATCH_ROWS
from offplan.runtime.forms.kernels import find_block, spread, store_sums

_PATCH_ROWS = tl.constexpr(PATCH_ROWS)
_BASE_WORDS = tl.constexpr(BASE_BYTES // 4)
"""Words of a block, whose exponents share a base."""
_POWER = tl.constexpr(48)
"""Weights or inputs are multiplied by two to this power. Weights as their codes say them are
2**-126 to 2**-111, and their products would be subnormal numbers."""
_FACTOR = tl.constexpr(2.0**48)
_HALF_POWER = tl.constexpr(113)
"""``_POWER`` of weights that become float16: 2**-13 to 2**2, no subnormal numbers."""
_HALF_FACTOR = tl.constexpr(2.0**113)


@triton.jit
def pair_codes(exponents, half: tl.constexpr, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of bytes ``part`` (0 or 1) and ``part`` + 2 as their weights' exponents."""
    if 8 * part + 4 * half < 7:
        codes = exponents << (7 - 8 * part - 4 * half)
    else:
        codes = exponents >> (8 * part + 4 * half - 7)
    return codes & 0x07800780


@triton.jit
def pair_bits(words, codes, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights of bytes ``part`` (0 or 1) and ``part`` + 2: two bfloat16 in a word.

    They lack a factor of two to the power of their base. ``codes`` are theirs; with those of
    ``pair_codes`` five operations make two weights.
    """
    if part == 0:
        both = ((words << 8) & -0x7FFF8000) | (words & 0x007F007F)
    else:
        both = (words & -0x7FFF8000) | ((words >> 8) & 0x007F007F)
    return both | codes


@triton.jit
def add_base(both, codes, base):  # type: ignore[no-untyped-def]
    """Add the base to the exponents of two bfloat16 of a word whose codes are not 0."""
    is_more = ((codes + 0x07800780) >> 4) & 0x00800080
    return both + is_more * base


@triton.jit
def widen(both):  # type: ignore[no-untyped-def]
    """Return two bfloat16 of a word as float32, whose first half a bfloat16 is."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def two_to(power):  # type: ignore[no-untyped-def]
    """Return a power of two, -126 to 127, as float32."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def point_at_bases(base, expert, num_out, row_words, row):  # type: ignore[no-untyped-def]
    """Return pointers to the bases of rows' first blocks; those of the next block are 64 behind."""
    num_blocks = (row_words + _BASE_WORDS - 1) // _BASE_WORDS
    of_expert = tl.cast(expert, tl.int64) * (num_out * num_blocks)
    rows_before = row // _PATCH_ROWS * _PATCH_ROWS
    return base + of_expert + rows_before * num_blocks + row % _PATCH_ROWS


@triton.jit
def load_bases(bases, start, row_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the bases of rows' words from ``start``, where a block begins, on: [rows, WORDS]."""
    BLOCKS: tl.constexpr = WORDS // _BASE_WORDS
    block = (tl.arange(0, BLOCKS) + start // _BASE_WORDS)[None, :]
    inside = block * _BASE_WORDS < row_words
    of_blocks = tl.load(bases[:, None] + block * _PATCH_ROWS, mask=inside, other=0).to(tl.int32)
    return spread(of_blocks, _BASE_WORDS)


@triton.jit
def scale_pair(both):  # type: ignore[no-untyped-def]
    """Multiply two bfloat16 of a word by 2**48, exactly and in one operation."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 f, z; mov.b32 f, 0x57805780; mov.b32 z, 0x80008000;"
        " fma.rn.bf16x2 $0, $1, f, z;}",
        "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def load_pairs(x, at, inside):  # type: ignore[no-untyped-def]
    """Load pairs of neighbouring inputs as float32, times 2**48."""
    if x.dtype.element_ty == tl.bfloat16:
        words = x.to(tl.pointer_type(tl.int32), bitcast=True)
        low, high = widen(tl.load(words + at, mask=inside, other=0))
    else:
        low = tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    return low * _FACTOR, high * _FACTOR


@triton.jit
def find_inputs(  # type: ignore[no-untyped-def]
    start, at, part: tl.constexpr, row_words, OF_PAIR: tl.constexpr, WHOLE: tl.constexpr
):
    """Return where a half of a row of inputs has those of the weights that ``part`` of words makes.

    ``part`` is 0 or 1. Pairs (OF_PAIR 1) or inputs (OF_PAIR 2) are counted, and ``at`` counts those
    from word ``start`` on. ``WHOLE`` says that a half is whole blocks.
    """
    first = start // _BASE_WORDS * _BASE_WORDS
    at += OF_PAIR * (start - first)
    # divided like this, the compiler sees which of them lie in a row
    block = first + at // (OF_PAIR * _BASE_WORDS) * _BASE_WORDS
    words = _BASE_WORDS if WHOLE else tl.minimum(_BASE_WORDS, row_words - block)
    return OF_PAIR * (2 * block + words * part) + at % (OF_PAIR * _BASE_WORDS)


@triton.jit
def load_patches(patches, at, stop, num_in):  # type: ignore[no-untyped-def]
    """Return the rows, columns and bits of patches; the row is -1 past their end."""
    inside = at < stop
    place = tl.load(patches + 2 * at, mask=inside, other=-1)
    # a pass that only allocates may find a slot of the ring not yet filled
    row = tl.where(place < 0, -1, place // num_in)
    bits = tl.load(patches + 2 * at + 1, mask=inside, other=0)
    return row, place - row * num_in, bits


@triton.jit
def find_patches(patches, patch_blocks, reserve, expert, num_out, row):  # type: ignore[no-untyped-def]
    """Return an expert's patches, and where those of the block of a row begin and end in them."""
    bounds = patch_blocks + 2 * (expert * (num_out // _PATCH_ROWS) + row // _PATCH_ROWS)
    begin, stop = tl.maximum(tl.load(bounds), 0), tl.minimum(tl.load(bounds + 1), reserve)
    return patches + tl.cast(expert, tl.int64) * (2 * reserve), begin, stop


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x, out, order, starts, num_pairs, num_out, row_words, split_words, pairs_per_row, num_experts,
    more, weight, exponent, base, patches, patch_blocks, reserve, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of a weight and a part of their length: times BLOCK_M inputs."""
    expert, begin, stop_pair = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < stop_pair
    pair = m
    first_row = n.to(tl.int64)
    if EXPERTS:
        pair = tl.load(order + m, mask=is_pair, other=0)
        first_row += tl.cast(expert, tl.int64) * num_out
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + (pair // pairs_per_row).to(tl.int64)[None, :] * (8 * row_words)
    bases = point_at_bases(base, expert, num_out, row_words, n)
    power: tl.constexpr = _POWER if x.dtype.element_ty == tl.bfloat16 else _HALF_POWER
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_words
    stop = tl.minimum(first + split_words, row_words)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weights = tl.arange(0, 2 * BLOCK_K)
        is_word = (k < stop)[None, :]
        is_input = (2 * start + weights < 2 * stop)[:, None] & is_pair[None, :]
        # asked for here, the bases are there when the tile is done
        powers = tl.load(bases + start // _BASE_WORDS * _PATCH_ROWS).to(tl.int32) - power
        tile = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                both = pair_bits(words, pair_codes(codes, half, part), part)
                column = find_inputs(start, weights, part, row_words, 2, WHOLE)
                at = inputs + half * 4 * row_words + column[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                if v.dtype == tl.bfloat16:
                    both = scale_pair(both)
                    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
                    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                else:
                    low, high = widen(both)
                    low = (low * _HALF_FACTOR).to(v.dtype)
                    high = (high * _HALF_FACTOR).to(v.dtype)
                # a word of two weights is what the matrix units take: no operation joins them
                tile = tl.dot(tl.join(low, high).reshape(BLOCK_N, 2 * BLOCK_K), v, tile)
        sums += tile * two_to(powers)[:, None]
    if tl.program_id(2) == 0:
        own, patch, stop_patch = find_patches(
            patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
        )
        for start in tl.range(patch, stop_patch, 32, num_stages=1):
            at = start + tl.arange(0, 32)
            row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
            is_own = (row >= 0)[:, None] & is_pair[None, :]
            v = tl.load(inputs + column[:, None], mask=is_own, other=0.0)
            value = (bits << 16).to(tl.float32, bitcast=True)
            found = tl.where(row[None, :] == n[:, None], value[None, :], 0.0)
            sums = tl.dot(found.to(v.dtype), v, sums)
    size = tl.cast(num_pairs, tl.int64) * num_out
    store_sums(out, sums, pair, n, size, num_out, is_pair[None, :])


@triton.jit
def multiply_each(  # type: ignore[no-untyped-def]
    x, out, order, starts, num_pairs, num_out, row_words, split_words, pairs_per_row, num_experts,
    more, weight, exponent, base, patches, patch_blocks, reserve, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of a weight, times BLOCK_M inputs, without tensor cores."""
    expert, begin, stop = find_block(starts, num_pairs, num_experts, EXPERTS, BLOCK_M)
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    if BLOCK_M == 1:
        _multiply_one(
            x, out, order, begin, expert, num_out, row_words, pairs_per_row, weight, exponent,
            base, patches, patch_blocks, reserve, EXPERTS, BLOCK_N, BLOCK_K, WHOLE,
        )  # fmt: skip
    else:
        for at in range(begin, tl.minimum(begin + BLOCK_M, stop)):
            _multiply_one(
                x, out, order, at, expert, num_out, row_words, pairs_per_row, weight, exponent,
                base, patches, patch_blocks, reserve, EXPERTS, BLOCK_N, BLOCK_K, WHOLE,
            )  # fmt: skip


@triton.jit
def _multiply_one(  # type: ignore[no-untyped-def]
    x, out, order, begin, expert, num_out, row_words, pairs_per_row, weight, exponent, base,
    patches, patch_blocks, reserve, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Multiply a program's rows by the input of a pair."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = begin
    if EXPERTS:
        pair = tl.load(order + begin)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + tl.cast(pair // pairs_per_row, tl.int64) * (8 * row_words)
    # four rows' bases are one word: what is as large the compiler asks for tiles ahead
    num_blocks = (row_words + _BASE_WORDS - 1) // _BASE_WORDS
    before = n // _PATCH_ROWS * (_PATCH_ROWS // 4) * num_blocks + n % _PATCH_ROWS // 4
    before += tl.cast(expert, tl.int64) * (num_out * num_blocks) // 4
    bases = (base.to(tl.pointer_type(tl.int32), bitcast=True) + before)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, row_words, BLOCK_K, num_stages=3):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < row_words
        is_word = inside[None, :]
        block = (tl.arange(0, BLOCK_K // _BASE_WORDS) + start // _BASE_WORDS)[None, :]
        is_block = block < num_blocks
        found = tl.load(bases + block * (_PATCH_ROWS // 4), mask=is_block, other=0)
        powers = ((found >> (n % 4 * 8)[:, None]) & 0xFF) - _POWER
        tile = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                low, high = widen(pair_bits(words, pair_codes(codes, half, part), part))
                at = find_inputs(start, tl.arange(0, BLOCK_K), part, row_words, 1, WHOLE)
                x_low, x_high = load_pairs(inputs + half * 4 * row_words, at, inside)
                tile += low * x_low[None, :]
                tile += high * x_high[None, :]
        sums += tile * spread(two_to(powers), _BASE_WORDS)
    product = tl.sum(sums, 1)
    own, patch, stop_patch = find_patches(
        patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
    )
    for start in tl.range(patch, stop_patch, 64, num_stages=1):
        at = start + tl.arange(0, 64)
        row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
        is_own = (row // BLOCK_N == tl.program_id(0)) & (row >= 0)
        value = (bits << 16).to(tl.float32, bitcast=True)
        found = tl.load(inputs + column, mask=is_own, other=0.0).to(tl.float32) * value
        product += tl.sum(tl.where(row[None, :] == n[:, None], found[None, :], 0.0), 1)
    where = out + tl.cast(pair, tl.int64) * num_out + n
    tl.store(where, product.to(out.dtype.element_ty))


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    out, rows, num_out, row_words, weight, exponent, base, patches, patch_blocks, reserve,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N rows of a weight: writes their bits, two in a word of ``out``.

    They are all rows in their order or, where there are ``rows``, each of these alone (BLOCK_N 1).
    A row that the weight does not have is written as NaN.
    """
    expert = tl.program_id(1)
    place = tl.program_id(0) * BLOCK_N
    first = place
    if rows is not None:
        first = tl.load(rows + place)
        is_there = (first >= 0) & (first < num_out)
        first = tl.where(is_there, first, 0)
    n = first + tl.arange(0, BLOCK_N)
    before = tl.cast(expert, tl.int64) * num_out
    bases = point_at_bases(base, expert, num_out, row_words, n)
    halves = exponent + (before + n)[:, None] * row_words
    words_before = (before + n)[:, None] * (2 * row_words)
    to = out + (before + place + tl.arange(0, BLOCK_N))[:, None] * (4 * row_words)
    for start in range(0, row_words, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_word = (k < row_words)[None, :]
        powers = load_bases(bases, start, row_words, BLOCK_K)
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            at = words_before + half * row_words + k[None, :]
            words = tl.load(weight + at, mask=is_word, other=0)
            for part in tl.static_range(2):
                of_part = pair_codes(codes, half, part)
                both = add_base(pair_bits(words, of_part, part), of_part, powers)
                if rows is not None:
                    both = tl.where(is_there, both, 0x7FC07FC0)
                pair = find_inputs(start, tl.arange(0, BLOCK_K), part, row_words, 1, WHOLE)
                tl.store(to + (half * 2 * row_words + pair)[None, :], both, mask=is_word)
    tl.debug_barrier()  # escapes were written as something else, by other threads
    own, patch, stop_patch = find_patches(patches, patch_blocks, reserve, expert, num_out, first)
    values = out.to(tl.pointer_type(tl.int16), bitcast=True)
    for start in range(patch, stop_patch, 64):
        at = start + tl.arange(0, 64)
        row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
        is_own = (row >= first) & (row < first + BLOCK_N)
        where = (before + place + row - first) * (8 * row_words) + column
        tl.store(values + where, bits.to(tl.int16), mask=is_own)
