"""Products and expansion of bfloat16 weights that are packed without loss.

Four bytes of EXPONENT, a word, have those of four weights in a row in the first half of a row and
of four in the second: with the words of WEIGHT of both they make eight weights at once. Rows come
in whole blocks of 64.
"""

import triton
import triton.language as tl

from offplan.forms.form import PATCH_ROWS
from offplan.runtime.forms.kernels import find_block
from offplan.runtime.forms.reference import ESCAPE

_ESCAPE = tl.constexpr(ESCAPE)
_PATCH_ROWS = tl.constexpr(PATCH_ROWS)
_MOST_POWER = tl.constexpr(126)
"""The largest power of two that weights are scaled by in bfloat16."""


@triton.jit
def pair_codes(exponents, half: tl.constexpr, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of weights ``part`` (0 or 1) and ``part`` + 2, as low bits of exponents."""
    if 8 * part + 4 * half < 7:
        codes = exponents << (7 - 8 * part - 4 * half)
    else:
        codes = exponents >> (8 * part + 4 * half - 7)
    return codes & 0x07800780


@triton.jit
def pair_bits(words, codes, top, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights ``part`` (0 or 1) and ``part`` + 2 of a half's words: two bfloat16 in a word.

    ``codes`` are theirs, ``top`` is the exponent that code 0 stands for, [rows]; with those of
    ``pair_codes`` eight operations make two weights.
    """
    if part == 0:
        both = ((words << 8) & -0x7FFF8000) | (words & 0x007F007F)
    else:
        both = (words & -0x7FFF8000) | ((words >> 8) & 0x007F007F)
    return both + ((top * 0x00800080)[:, None] - codes)


@triton.jit
def zero_escapes(both, codes, top):  # type: ignore[no-untyped-def]
    """Return two bfloat16 of a word with the exponent of an escape, ``top`` - 15, made 0."""
    is_escape = ((codes + 0x00800080) >> 4) & 0x00800080
    return both - is_escape * (top - _ESCAPE)[:, None]


@triton.jit
def widen(both):  # type: ignore[no-untyped-def]
    """Return two bfloat16 of a word as float32, whose first half a bfloat16 is."""
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def two_to(power):  # type: ignore[no-untyped-def]
    """Return a power of two, -126 to 127, as float32."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_tops(base):  # type: ignore[no-untyped-def]
    """Return what rows' exponents are decoded from, and how many powers of two less that is.

    Decoded from 15, an escape is zero without a look at it. Rows of lower exponents have none;
    those with NaN or infinities, which their exponent of 255 makes, are decoded as they are.
    """
    largest = tl.load(base).to(tl.int32)
    top = tl.where(largest == 255, largest, tl.minimum(largest, _ESCAPE))
    return top, largest - top


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
def place_of(column, row_words, part_elements):  # type: ignore[no-untyped-def]
    """Return where the planes of inputs have a column of the first row.

    Plane ``4 * half + part`` has every fourth input of a half of a row.
    """
    word = column // 4
    half = word // row_words
    return (4 * half + column % 4) * part_elements + word - half * row_words


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    row_words,
    split_words,
    pairs_per_row,
    num_experts,
    weight,
    exponent,
    base,
    patches,
    patch_blocks,
    reserve,
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
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < stop_pair
    pair = m
    first_row = n.to(tl.int64)
    if EXPERTS:
        pair = tl.load(order + m, mask=is_pair, other=0)
        first_row += tl.cast(expert, tl.int64) * num_out
    part_elements = num_pairs // pairs_per_row * row_words
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + (pair // pairs_per_row).to(tl.int64)[None, :] * row_words
    top, lacking = load_tops(base + first_row)
    powers = tl.minimum(lacking, _MOST_POWER)
    factors = two_to(powers)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_words
    stop = tl.minimum(first + split_words, row_words)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < stop
        is_word = inside[None, :]
        is_input = inside[:, None] & is_pair[None, :]
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                both = pair_bits(words, pair_codes(codes, half, part), top, part)
                at = inputs + (4 * half + part) * part_elements + k[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                u = tl.load(at + 2 * part_elements, mask=is_input, other=0.0)
                if v.dtype == tl.bfloat16:
                    scale = factors.to(tl.bfloat16)
                    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True) * scale
                    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * scale
                else:
                    low, high = widen(both)
                    low = (low * factors).to(v.dtype)
                    high = (high * factors).to(v.dtype)
                sums = tl.dot(low, v, sums)
                sums = tl.dot(high, u, sums)
    sums *= two_to(lacking - powers)[:, None]
    if tl.program_id(2) == 0:
        own, patch, stop_patch = find_patches(
            patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
        )
        for start in tl.range(patch, stop_patch, 32, num_stages=1):
            at = start + tl.arange(0, 32)
            row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
            is_own = (row >= 0)[:, None] & is_pair[None, :]
            place = place_of(column, row_words, part_elements)
            v = tl.load(inputs + place[:, None], mask=is_own, other=0.0)
            value = (bits << 16).to(tl.float32, bitcast=True)
            found = tl.where(row[None, :] == n[:, None], value[None, :], 0.0)
            sums = tl.dot(found.to(v.dtype), v, sums)
    where = out + (tl.program_id(2) * num_pairs + pair).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_pair[None, :])


@triton.jit
def multiply_each(  # type: ignore[no-untyped-def]
    x,
    out,
    order,
    starts,
    num_pairs,
    num_out,
    row_words,
    split_words,
    pairs_per_row,
    num_experts,
    weight,
    exponent,
    base,
    patches,
    patch_blocks,
    reserve,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of a weight, times one input, without tensor cores."""
    expert, begin, _ = find_block(starts, num_pairs, num_experts, EXPERTS, 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = begin
    if EXPERTS:
        pair = tl.load(order + begin)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    part_elements = num_pairs // pairs_per_row * row_words
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + tl.cast(pair // pairs_per_row, tl.int64) * row_words
    top, _ = load_tops(base + first_row)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, row_words, BLOCK_K, num_stages=3):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < row_words
        is_word = inside[None, :]
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                low, high = widen(pair_bits(words, pair_codes(codes, half, part), top, part))
                at = inputs + (4 * half + part) * part_elements + k
                # weights are as small as 2**-126: their products must be no subnormal numbers
                v = tl.load(at, mask=inside, other=0.0).to(tl.float32) * 2.0**64
                sums += low * v[None, :]
                v = tl.load(at + 2 * part_elements, mask=inside, other=0.0).to(tl.float32) * 2.0**64
                sums += high * v[None, :]
    _, lacking = load_tops(base + first_row)
    # no float32 is the whole of what is lacking
    powers = tl.minimum(lacking, 150)
    made = tl.sum(sums, 1) * two_to(powers - 64) * two_to(lacking - powers)
    own, patch, stop_patch = find_patches(
        patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
    )
    for start in tl.range(patch, stop_patch, 64, num_stages=1):
        at = start + tl.arange(0, 64)
        row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
        is_own = (row // BLOCK_N == tl.program_id(0)) & (row >= 0)
        place = place_of(column, row_words, part_elements)
        value = (bits << 16).to(tl.float32, bitcast=True)
        found = tl.load(inputs + place, mask=is_own, other=0.0).to(tl.float32) * value
        made += tl.sum(tl.where(row[None, :] == n[:, None], found[None, :], 0.0), 1)
    where = out + tl.cast(pair, tl.int64) * num_out + n
    tl.store(where, made.to(out.dtype.element_ty))


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    out,
    num_out,
    row_words,
    weight,
    exponent,
    base,
    patches,
    patch_blocks,
    reserve,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for BLOCK_N rows of a weight: writes their bits, two in a word of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(1)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    top = tl.load(base + first_row).to(tl.int32)
    halves = exponent + first_row[:, None] * row_words
    rows = first_row[:, None] * (2 * row_words)
    for start in range(0, row_words, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        is_word = k < row_words
        codes = tl.load(halves + k, mask=is_word, other=0)
        for half in tl.static_range(2):
            at = rows + half * row_words + k
            words = tl.load(weight + at, mask=is_word, other=0)
            low, high = pair_codes(codes, half, 0), pair_codes(codes, half, 1)
            even = zero_escapes(pair_bits(words, low, top, 0), low, top)
            odd = zero_escapes(pair_bits(words, high, top, 1), high, top)
            both = tl.join((even & 0xFFFF) | (odd << 16), ((even >> 16) & 0xFFFF) | (odd & -65536))
            where = out + 2 * at[:, :, None] + tl.arange(0, 2)[None, None, :]
            tl.store(where, both, mask=is_word[:, :, None])
    tl.debug_barrier()  # escapes were written as something else, by other threads
    own, patch, stop_patch = find_patches(
        patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
    )
    values = out.to(tl.pointer_type(tl.int16), bitcast=True)
    for start in range(patch, stop_patch, 64):
        at = start + tl.arange(0, 64)
        row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
        is_own = (row // BLOCK_N == tl.program_id(0)) & (row >= 0)
        where = (tl.cast(expert, tl.int64) * num_out + row) * (8 * row_words) + column
        tl.store(values + where, bits.to(tl.int16), mask=is_own)
