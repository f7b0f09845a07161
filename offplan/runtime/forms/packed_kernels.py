"""Products and expansion of bfloat16 weights that are packed without loss.

Four bytes of EXPONENT, a word, have those of four weights in a row in the first half of a row and
of four in the second: with the words of WEIGHT of both they make eight weights at once. Rows come
in whole blocks of 64.
"""

import triton
import triton.language as tl

from offplan.forms.form import BASE_BYTES, PATCH_ROWS
from offplan.runtime.forms.kernels import find_block, spread

INPUT_FACTOR = 2.0**48
"""What bfloat16 inputs are multiplied by: their products with codes as they are, of 2**-126 to
2**-111, are then no subnormal numbers."""

_PATCH_ROWS = tl.constexpr(PATCH_ROWS)
_BASE_WORDS = tl.constexpr(BASE_BYTES // 4)
"""Words of exponents that share a base."""
_INPUT_POWER = tl.constexpr(48)
_INPUT_FACTOR = tl.constexpr(INPUT_FACTOR)
_CODE_POWER = tl.constexpr(113)
_CODE_FACTOR = tl.constexpr(2.0**113)
"""What codes are multiplied by instead, to be float16: 2**-13 to 2**2, no subnormal numbers."""


@triton.jit
def pair_codes(exponents, half: tl.constexpr, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of weights ``part`` (0 or 1) and ``part`` + 2 as their exponents' bits."""
    if 8 * part + 4 * half < 7:
        codes = exponents << (7 - 8 * part - 4 * half)
    else:
        codes = exponents >> (8 * part + 4 * half - 7)
    return codes & 0x07800780


@triton.jit
def pair_bits(words, codes, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights ``part`` (0 or 1) and ``part`` + 2 of a half's words: two bfloat16 in a word.

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
def load_scaled(at, inside):  # type: ignore[no-untyped-def]
    """Load inputs as float32, scaled by INPUT_POWER, as bfloat16 ones are stored."""
    v = tl.load(at, mask=inside, other=0.0)
    return v.to(tl.float32) if v.dtype == tl.bfloat16 else v.to(tl.float32) * _INPUT_FACTOR


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
def place_of(column, row_words, plane_elements, IN_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where the planes of inputs have a column of the first row.

    Plane ``4 * half + part`` has every fourth input of a half of a row. IN_PAIRS has planes
    ``2 * half + part``, where inputs of weights ``part`` and ``part`` + 2 of a word are neighbours.
    """
    word = column // 4
    half = word // row_words
    word -= half * row_words
    if IN_PAIRS:
        return (2 * half + column % 2) * plane_elements + 2 * word + column % 4 // 2
    return (4 * half + column % 4) * plane_elements + word


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
    plane_elements = num_pairs // pairs_per_row * (2 * row_words)
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + (pair // pairs_per_row).to(tl.int64)[None, :] * (2 * row_words)
    bases = point_at_bases(base, expert, num_out, row_words, n)
    scale: tl.constexpr = _INPUT_POWER if x.dtype.element_ty == tl.bfloat16 else _CODE_POWER
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * split_words
    stop = tl.minimum(first + split_words, row_words)
    for start in range(first, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        column = 2 * start + tl.arange(0, 2 * BLOCK_K)
        is_word = (k < stop)[None, :]
        is_input = (column < 2 * stop)[:, None] & is_pair[None, :]
        # asked for here, the bases are there when the tile is done
        powers = tl.load(bases + start // _BASE_WORDS * _PATCH_ROWS).to(tl.int32) - scale
        tile = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                both = pair_bits(words, pair_codes(codes, half, part), part)
                at = inputs + (2 * half + part) * plane_elements + column[:, None]
                v = tl.load(at, mask=is_input, other=0.0)
                if v.dtype == tl.bfloat16:
                    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
                    high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                else:
                    low, high = widen(both)
                    low = (low * _CODE_FACTOR).to(v.dtype)
                    high = (high * _CODE_FACTOR).to(v.dtype)
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
            place = place_of(column, row_words, plane_elements, True)
            v = tl.load(inputs + place[:, None], mask=is_own, other=0.0)
            if v.dtype == tl.bfloat16:
                v = (v.to(tl.float32) * (1 / _INPUT_FACTOR)).to(v.dtype)
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
    if EXPERTS:  # noqa: SIM102 (a constant, apart from what is computed)
        if expert >= num_experts:
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = begin
    if EXPERTS:
        pair = tl.load(order + begin)
    first_row = tl.cast(expert, tl.int64) * num_out + n
    part_elements = num_pairs // pairs_per_row * row_words
    halves = exponent + first_row[:, None] * row_words
    rows = weight + first_row[:, None] * (2 * row_words)
    inputs = x + tl.cast(pair // pairs_per_row, tl.int64) * row_words
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
        powers = ((found >> (n % 4 * 8)[:, None]) & 0xFF) - _INPUT_POWER
        tile = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        codes = tl.load(halves + k[None, :], mask=is_word, other=0)
        for half in tl.static_range(2):
            words = tl.load(rows + half * row_words + k[None, :], mask=is_word, other=0)
            for part in tl.static_range(2):
                low, high = widen(pair_bits(words, pair_codes(codes, half, part), part))
                at = inputs + (4 * half + part) * part_elements + k
                tile += low * load_scaled(at, inside)[None, :]
                tile += high * load_scaled(at + 2 * part_elements, inside)[None, :]
        sums += tile * spread(two_to(powers), _BASE_WORDS)
    made = tl.sum(sums, 1)
    own, patch, stop_patch = find_patches(
        patches, patch_blocks, reserve, expert, num_out, tl.program_id(0) * BLOCK_N
    )
    for start in tl.range(patch, stop_patch, 64, num_stages=1):
        at = start + tl.arange(0, 64)
        row, column, bits = load_patches(own, at, stop_patch, 8 * row_words)
        is_own = (row // BLOCK_N == tl.program_id(0)) & (row >= 0)
        place = place_of(column, row_words, part_elements, False)
        value = (bits << 16).to(tl.float32, bitcast=True)
        found = load_scaled(inputs + place, is_own) * (1 / _INPUT_FACTOR) * value
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
    bases = point_at_bases(base, expert, num_out, row_words, n)
    halves = exponent + first_row[:, None] * row_words
    rows = first_row[:, None] * (2 * row_words)
    for start in range(0, row_words, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        is_word = k < row_words
        powers = load_bases(bases, start, row_words, BLOCK_K)
        codes = tl.load(halves + k, mask=is_word, other=0)
        for half in tl.static_range(2):
            at = rows + half * row_words + k
            words = tl.load(weight + at, mask=is_word, other=0)
            low, high = pair_codes(codes, half, 0), pair_codes(codes, half, 1)
            even = add_base(pair_bits(words, low, 0), low, powers)
            odd = add_base(pair_bits(words, high, 1), high, powers)
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
