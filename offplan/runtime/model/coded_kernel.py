"""Attention of new tokens to a cache, reading what each token sees and nothing else.

Programs split what a row sees, as in ``latent_kernel``. The cache has values, or codes. Products
are then of codes: a token's scale multiplies its score, or its weight. The bits of a code, moved,
are those of a float of the query's type which lacks a power of two, so that every GPU decodes in
three operations of whole numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import CODED_PROGRAMS, LATENT_HEADS
from offplan.row_cache import SCALE_BYTES
from offplan.runtime.gpu_limits import gpu_limits
from offplan.runtime.model.cache_codes import BITS, is_coded
from offplan.runtime.model.codes_kernel import SCALE_WIDTH, decode, load_scales
from offplan.runtime.model.latent_kernel import (
    begin_softmax,
    choose_warps,
    join_splits,
    take_tokens,
    write_split,
)

MAX_BLOCK_TOKENS = 64
"""Cached tokens that a program takes at a time, where its shared memory has room for them.

Source: as for latents; not measured.
"""
MOST_ELEMENTS = 2**15 + 2**14
"""Elements of cached tokens that the threads of a program have registers for.

Source: compiled, as ``choose_warps``: of 64 tokens of two heads of 512 elements each thread would
store 80 bytes in local memory.
"""
ALL, WINDOW, CHUNK, RING, RING_OF_CHUNK = range(5)
"""What a token sees of the cache: all up to its own, the last tokens or those of its chunk of the
text, of the whole context or of a ring."""
SEES = ("all", "window", "chunk", "ring", "ring_of_chunk")
_WINDOW, _CHUNK, _RING = tl.constexpr(WINDOW), tl.constexpr(CHUNK), tl.constexpr(RING)
_RING_OF_CHUNK = tl.constexpr(RING_OF_CHUNK)


class Powers(NamedTuple):
    """Powers of two by which products of codes that lack one stay in a type's range."""

    query_power: int
    """Power of two that queries are multiplied by, for products that float32 has."""
    weight_power: int
    """The same of softmax weights."""


POWERS = {torch.bfloat16: Powers(60, 60), torch.float16: Powers(0, 2)}


VALUES = {"SHIFT": 0, "MASK": 0, "QUERY_POWER": 0, "WEIGHT_POWER": 0, "POWER": 0}
"""The constants of a cache of values."""


def choose_constants(dtype: torch.dtype) -> dict[str, int]:
    """Return the constants of both kernels that depend on the query's type, for codes."""
    kind, powers = BITS[dtype], POWERS[dtype]
    return {
        "SHIFT": kind.shift,
        "MASK": kind.mask & 0xFFFF,
        "QUERY_POWER": powers.query_power,
        "WEIGHT_POWER": powers.weight_power,
        "POWER": kind.power,
    }


@triton.jit
def _find_seen(position, REACH: tl.constexpr, SEES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first place of the cache that a token sees, and the place behind the last."""
    first, stop = position * 0, position + 1
    if SEES == _WINDOW:
        first = tl.maximum(stop - REACH, 0)
    elif SEES == _CHUNK:
        first = position - position % REACH
    elif SEES == _RING:
        stop = tl.minimum(stop, REACH)
    elif SEES == _RING_OF_CHUNK:
        stop = position % REACH + 1
    return first, stop


@triton.jit
def _find_share(first, stop, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the places that one of the splits takes of those from ``first`` to ``stop``."""
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(stop - first, num_splits), BLOCK_S) * BLOCK_S
    begin = first + split * share
    return begin, tl.minimum(begin + share, stop)


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    position,
    partial,
    log_sums,
    context,
    group,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REACH: tl.constexpr,
    SEES: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    QUERY_POWER: tl.constexpr,
    WEIGHT_POWER: tl.constexpr,
    POWER: tl.constexpr,
    IS_CODED: tl.constexpr,
    MODULUS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for heads of a KV group of one query, and one split of what it sees.

    Each query has a cache of its own with ``OWN_ROWS``, else all read one. With a ``MODULUS`` a
    token lies in the place of its position modulo that.
    """
    pair, num_splits = tl.program_id(0), tl.num_programs(2)
    row = pair // NUM_KV
    cached = row * OWN_ROWS * NUM_KV + pair % NUM_KV
    member = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = member < group
    first, stop = _find_seen(tl.load(position + row).to(tl.int32), REACH, SEES)
    first, stop = _find_share(first, stop, BLOCK_S)

    dim, value_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    at = pair * group + member
    is_query = is_head[:, None] & (dim < KEY)[None, :]
    q = tl.load(query + at[:, None] * KEY + dim[None, :], mask=is_query, other=0.0)
    q = (q.to(tl.float32) * 2.0**QUERY_POWER).to(q.dtype)
    key_row: tl.constexpr = KEY + SCALE_WIDTH if IS_CODED else KEY
    value_row: tl.constexpr = VALUE + SCALE_WIDTH if IS_CODED else VALUE
    keys += cached.to(tl.int64) * context * key_row
    values += cached.to(tl.int64) * context * value_row
    top, total, mixed = begin_softmax(BLOCK_H, BLOCK_V)
    factor: tl.constexpr = SCALE * 2.0 ** (POWER - QUERY_POWER)
    for begin in range(first, stop, BLOCK_S):
        token = begin + tl.arange(0, BLOCK_S)
        is_token = token < stop
        if MODULUS > 0:
            token = token % MODULUS
        is_key = is_token[:, None] & (dim < KEY)[None, :]
        is_value = is_token[:, None] & (value_dim < VALUE)[None, :]
        key = tl.load(keys + token[:, None] * key_row + dim[None, :], mask=is_key, other=0)
        places = token[:, None] * value_row + value_dim[None, :]
        value = tl.load(values + places, mask=is_value, other=0)
        if IS_CODED:
            key = decode(key, SHIFT, MASK, q.dtype)
            value = decode(value, SHIFT, MASK, q.dtype)
            of_key = load_scales(keys, token, is_token, key_row)
            weighing = load_scales(values, token, is_token, value_row) * 2.0**WEIGHT_POWER
            score = tl.dot(q, tl.trans(key)) * (of_key * factor)[None, :]
        else:
            score, weighing = tl.dot(q, tl.trans(key)) * factor, None
        if SOFT_CAP > 0:
            score = SOFT_CAP * (2 * tl.sigmoid(2 * score / SOFT_CAP) - 1)
        top, total, mixed = take_tokens(top, total, mixed, score, is_token, value, weighing)
    at = at * num_splits + tl.program_id(2)
    back: tl.constexpr = 2.0 ** (POWER - WEIGHT_POWER)
    write_split(top, total, mixed, first < stop, at, is_head, partial, log_sums, back)


@triton.jit
def _attend_latent_split(  # type: ignore[no-untyped-def]
    query,
    query_rotary,
    latents,
    rotaries,
    position,
    partial,
    log_sums,
    context,
    num_heads,
    SCALE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    QUERY_POWER: tl.constexpr,
    WEIGHT_POWER: tl.constexpr,
    POWER: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for heads of one query, and one split of the cached latents that it sees.

    Each query has a cache of its own with ``OWN_ROWS``, else all read one.
    """
    row, num_splits = tl.program_id(0), tl.num_programs(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    filled = tl.load(position + row).to(tl.int32) + 1
    first, stop = _find_share(filled * 0, filled, BLOCK_S)

    dim, rope = tl.arange(0, LATENT), tl.arange(0, ROPE)
    at = row * num_heads + head
    q = tl.load(query + at[:, None] * LATENT + dim[None, :], mask=is_head[:, None], other=0.0)
    q_rope = tl.load(
        query_rotary + at[:, None] * ROPE + rope[None, :], mask=is_head[:, None], other=0.0
    )
    q = (q.to(tl.float32) * 2.0**QUERY_POWER).to(q.dtype)
    q_rope = (q_rope.to(tl.float32) * 2.0**QUERY_POWER).to(q.dtype)
    cached = (row * OWN_ROWS).to(tl.int64) * context
    latents += cached * (LATENT + SCALE_WIDTH)
    rotaries += cached * (ROPE + SCALE_WIDTH)
    top, total, mixed = begin_softmax(BLOCK_H, LATENT)
    factor: tl.constexpr = SCALE * 2.0 ** (POWER - QUERY_POWER)
    for begin in range(first, stop, BLOCK_S):
        token = begin + tl.arange(0, BLOCK_S)
        is_token = token < stop
        places = token[:, None] * (LATENT + SCALE_WIDTH) + dim[None, :]
        codes = tl.load(latents + places, mask=is_token[:, None], other=0)
        latent = decode(codes, SHIFT, MASK, q.dtype)
        places = token[:, None] * (ROPE + SCALE_WIDTH) + rope[None, :]
        codes = tl.load(rotaries + places, mask=is_token[:, None], other=0)
        angle = decode(codes, SHIFT, MASK, q.dtype)
        of_latent = load_scales(latents, token, is_token, LATENT + SCALE_WIDTH)
        of_angle = load_scales(rotaries, token, is_token, ROPE + SCALE_WIDTH)
        score = tl.dot(q, tl.trans(latent)) * (of_latent * factor)[None, :]
        score += tl.dot(q_rope, tl.trans(angle)) * (of_angle * factor)[None, :]
        weighing = of_latent * 2.0**WEIGHT_POWER
        top, total, mixed = take_tokens(top, total, mixed, score, is_token, latent, weighing)
    at = at * num_splits + tl.program_id(2)
    back: tl.constexpr = 2.0 ** (POWER - WEIGHT_POWER)
    write_split(top, total, mixed, first < stop, at, is_head, partial, log_sums, back)


def shared_size(width: int, block: int, itemsize: int = 1) -> int:
    """Bytes of shared memory that a program takes at most for ``block`` tokens of a width."""
    return 2 * (itemsize * block + LATENT_HEADS) * width + 16 * block


def choose_block(width: int, shared_bytes: int, itemsize: int = 1) -> int:
    """Choose the cached tokens of a program; ``width`` is that of all it reads of a token.

    Source: triton 3.9's kernels for compute capabilities 8.0 to 12.0 and widths of 128 to 576. They
    take two buffers of what is cached and one of queries in 16 bits, and 16 bytes a token.
    """
    block = MAX_BLOCK_TOKENS
    while block > 16 and (
        shared_size(width, block, itemsize) > shared_bytes or block * width > MOST_ELEMENTS
    ):
        block //= 2
    return block


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    sees: int,
    reach: int,
    *,
    modulus: int = 0,
) -> torch.Tensor:
    """Mix cached values by softmax of their keys' products with the query.

    ``query`` is [batch, heads, dim], ``keys`` and ``values`` [batch, kv_heads, kept, dim] of its
    type, or codes in uint8, each row with SCALE_BYTES more; or those of one sequence that all
    queries read. All are contiguous. ``position``, int64 of ``batch`` elements on the device, is
    the last token that each query sees. ``sees`` says what of the cache a token sees, ``reach`` how
    many tokens of a window, a chunk or a ring. With a ``modulus`` a token lies in the place of its
    position modulo that. ``sinks`` is [heads]. Returns [batch, heads, value_dim]. Runs on the
    current stream, synchronises nothing.
    """
    batch, heads, key_dim = query.shape
    num_kv, context = keys.shape[1:3]
    coded = is_coded(keys)
    value_dim = values.shape[-1] - SCALE_BYTES * coded
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    group = heads // num_kv
    blocks = triton.cdiv(group, LATENT_HEADS)
    shared_bytes, num_processors = gpu_limits(query.device.index)
    block = choose_block(block_k + block_v, shared_bytes, keys.itemsize)
    most = min(reach, context) if sees != ALL else context
    num_programs = batch * num_kv * blocks
    splits = max(1, min(CODED_PROGRAMS * num_processors // num_programs, triton.cdiv(most, block)))
    partial = query.new_empty(batch, heads, splits, block_v, dtype=torch.float32)
    log_sums = query.new_empty(batch, heads, splits, dtype=torch.float32)
    constants = choose_constants(query.dtype) if coded else VALUES
    _attend_split[(batch * num_kv, blocks, splits)](
        query, keys, values, position, partial, log_sums, context, group,
        SCALE=scaling, SOFT_CAP=soft_cap or 0.0, KEY=key_dim, VALUE=value_dim, BLOCK_K=block_k,
        BLOCK_V=block_v, REACH=reach, SEES=sees, IS_CODED=coded, MODULUS=modulus,
        OWN_ROWS=int(len(keys) == batch), NUM_KV=num_kv, BLOCK_H=LATENT_HEADS, BLOCK_S=block,
        num_warps=choose_warps(max(block_k, block_v)), **constants,
    )  # fmt: skip
    out = query.new_empty(batch, heads, value_dim)
    join_splits[(batch * heads,)](
        partial, log_sums, log_sums if sinks is None else sinks, out, splits, heads,
        HAS_SINKS=sinks is not None, VALUE=value_dim, BLOCK_V=block_v,
        BLOCK=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out


def attend_latent_codes(
    query: torch.Tensor,
    query_rotary: torch.Tensor,
    latents: torch.Tensor,
    rotaries: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Mix latents that are cached as codes, as ``latent_kernel.attend_filled`` mixes values.

    ``latents`` are uint8 of [batch, context, latent + SCALE_BYTES], ``rotaries`` likewise, or those
    of one sequence that all queries read.
    """
    batch, heads, latent_dim = query.shape
    context, rope = rotaries.shape[1], query_rotary.shape[2]
    blocks = triton.cdiv(heads, LATENT_HEADS)
    shared_bytes, num_processors = gpu_limits(query.device.index)
    block = choose_block(latent_dim + rope, shared_bytes)
    splits = max(1, min(num_processors // (batch * blocks), triton.cdiv(context, block)))
    partial = query.new_empty(batch, heads, splits, latent_dim, dtype=torch.float32)
    log_sums = query.new_empty(batch, heads, splits, dtype=torch.float32)
    _attend_latent_split[(batch, blocks, splits)](
        query, query_rotary, latents, rotaries, position, partial, log_sums, context, heads,
        SCALE=scaling, LATENT=latent_dim, ROPE=rope, OWN_ROWS=int(len(latents) == batch),
        BLOCK_H=LATENT_HEADS, BLOCK_S=block, num_warps=choose_warps(latent_dim),
        **choose_constants(query.dtype),
    )  # fmt: skip
    out = torch.empty_like(query)
    join_splits[(batch * heads,)](
        partial, log_sums, log_sums, out, splits, heads, HAS_SINKS=False, VALUE=latent_dim,
        BLOCK_V=latent_dim, BLOCK=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out
