"""Attention of new tokens to cached latents, reading what is filled and nothing else.

The filled part is split among programs, whose results are joined by their softmax sums. How many
there are depends on shapes alone, so the same cache gives the same bits.
Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import LATENT_HEADS
from offplan.runtime.gpu_limits import gpu_limits

MAX_BLOCK_TOKENS = 64
"""Cached tokens that a program takes at a time, where its shared memory has room for them.

Source: the best of 18 settings on an H200 with those below. 1 to 64 sequences of 256 tokens take 9
to 15 us a layer. 64 sequences of 2,000 tokens take 45 us, 1.3 times what reading them takes.
"""


@triton.jit
def begin_softmax(BLOCK_H: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what an online softmax has of no tokens: largest scores, sums, mixed values."""
    top = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    return top, tl.zeros([BLOCK_H], tl.float32), tl.zeros([BLOCK_H, WIDTH], tl.float32)


@triton.jit
def take_tokens(top, total, mixed, score, is_token, value, factor):  # type: ignore[no-untyped-def]
    """Return an online softmax with some tokens more; each weight has the token's ``factor``."""
    score = tl.where(is_token[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp(score - higher[:, None])
    fade = tl.exp(top - higher)
    total = total * fade + tl.sum(weight, 1)
    if factor is not None:
        weight = weight * factor[None, :]
    return higher, total, tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])


@triton.jit
def write_split(top, total, mixed, is_any, at, is_head, partial, log_sums, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a split's mixed values times ``FACTOR`` and its softmax sum, if it has any tokens."""
    if is_any:
        tl.store(log_sums + at, top + tl.log(total), mask=is_head)
        dim = tl.arange(0, mixed.shape[1])
        where = partial + at.to(tl.int64)[:, None] * mixed.shape[1] + dim[None, :]
        tl.store(where, mixed * FACTOR / total[:, None], mask=is_head[:, None])
    else:
        tl.store(log_sums + at, top, mask=is_head)


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
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
    OWN_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for a block of heads of one query and one split of its cached tokens.

    Each query has a cache of its own with ``OWN_ROWS``, else all read one.
    """
    row, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    filled = tl.load(position + row).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(filled, num_splits), BLOCK_S) * BLOCK_S
    first = split * share
    stop = tl.minimum(first + share, filled)

    dim, rope = tl.arange(0, LATENT), tl.arange(0, ROPE)
    at = row * num_heads + head
    q = tl.load(query + at[:, None] * LATENT + dim[None, :], mask=is_head[:, None], other=0.0)
    q_rope = tl.load(
        query_rotary + at[:, None] * ROPE + rope[None, :], mask=is_head[:, None], other=0.0
    )
    kept = latents + (row * OWN_ROWS).to(tl.int64) * context * LATENT
    angles = rotaries + (row * OWN_ROWS).to(tl.int64) * context * ROPE
    top, total, mixed = begin_softmax(BLOCK_H, LATENT)
    for begin in range(first, stop, BLOCK_S):
        token = begin + tl.arange(0, BLOCK_S)
        is_token = token < stop
        is_kept = is_token[:, None]
        latent = tl.load(kept + token[:, None] * LATENT + dim[None, :], mask=is_kept, other=0.0)
        angle = tl.load(angles + token[:, None] * ROPE + rope[None, :], mask=is_kept, other=0.0)
        score = tl.dot(q_rope, tl.trans(angle), tl.dot(q, tl.trans(latent))) * SCALE
        top, total, mixed = take_tokens(top, total, mixed, score, is_token, latent, None)
    at = at * num_splits + split
    write_split(top, total, mixed, first < stop, at, is_head, partial, log_sums, 1.0)


@triton.jit
def join_splits(  # type: ignore[no-untyped-def]
    partial,
    log_sums,
    sinks,
    out,
    num_splits,
    num_heads,
    HAS_SINKS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for a head of a sequence: weigh its splits by their softmax sums.

    A sink takes its share of the softmax and gives nothing.
    """
    number = tl.program_id(0)
    at = number.to(tl.int64)
    split, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    sums = tl.load(log_sums + at * num_splits + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(sums, 0)
    total = tl.sum(tl.exp(sums - top), 0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + number % num_heads).to(tl.float32) - top)
    joined = tl.zeros([BLOCK_V], dtype=tl.float32)
    for each in range(num_splits):
        log_sum = tl.load(log_sums + at * num_splits + each)
        if log_sum != float("-inf"):  # of an empty split nothing was written
            part = tl.load(partial + (at * num_splits + each) * BLOCK_V + dim)
            joined += tl.exp(log_sum - top) / total * part
    tl.store(out + at * VALUE + dim, joined.to(out.dtype.element_ty), mask=dim < VALUE)


def choose_warps(width: int) -> int:
    """Choose the warps of a program; ``width`` is that of what it mixes, or of a key if wider.

    Of 256 elements and more the threads of 4 warps have too few registers. They store up to 1,400
    bytes each in local memory, which a GPU sets aside for all that it can run. That costs more than
    8 warps may lose. Source: triton 3.7's kernels for compute capabilities 8.0 to 12.0. On an H200,
    32,768 coded latents take 8 warps 0.5 to 0.7 of the time of 4. Others take up to 1.2 times as
    long: latents of 128 heads 78 us, not 68.
    """
    return 8 if width >= 256 else 4


def choose_block(width: int, shared_bytes: int) -> int:
    """Choose the cached tokens of a program; ``width`` is that of a latent and its rotary.

    Source: triton 3.9's kernels for compute capabilities 8.0 to 12.0, widths of 288 to 1,088 and 16
    to 64 tokens. They take exactly two buffers of tokens and one of queries, in 16 bits, and 32
    bytes a token.
    """
    block = MAX_BLOCK_TOKENS
    while block > 16 and (4 * block + 2 * LATENT_HEADS) * width + 32 * block > shared_bytes:
        block //= 2
    return block


def attend_filled(
    query: torch.Tensor,
    query_rotary: torch.Tensor,
    latents: torch.Tensor,
    rotaries: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Mix cached latents by softmax of their products with the query.

    ``query`` is [batch, heads, latent], ``query_rotary`` [batch, heads, rope]. ``latents`` are
    [batch, context, latent], ``rotaries`` [batch, context, rope], or those of one sequence that all
    read. All are contiguous; the widths of latent and rope are powers of two from 16 on.
    ``position``, int64 of ``batch`` elements on the device, is the last token that each sees.
    Returns [batch, heads, latent]. Runs on the
    current stream, synchronises nothing.
    """
    batch, heads, latent_dim = query.shape
    context, rope = rotaries.shape[1:]
    blocks = triton.cdiv(heads, LATENT_HEADS)
    shared_bytes, num_processors = gpu_limits(query.device.index)
    block = choose_block(latent_dim + rope, shared_bytes)
    splits = max(1, min(num_processors // (batch * blocks), triton.cdiv(context, block)))
    partial = query.new_empty(batch, heads, splits, latent_dim, dtype=torch.float32)
    log_sums = query.new_empty(batch, heads, splits, dtype=torch.float32)
    _attend_split[(batch, blocks, splits)](
        query, query_rotary, latents, rotaries, position, partial, log_sums,
        context, heads,
        SCALE=scaling, LATENT=latent_dim, ROPE=rope, OWN_ROWS=int(len(latents) == batch),
        BLOCK_H=LATENT_HEADS, BLOCK_S=block, num_warps=choose_warps(latent_dim),
    )  # fmt: skip
    out = torch.empty_like(query)
    join_splits[(batch * heads,)](
        partial, log_sums, log_sums, out, splits, heads, HAS_SINKS=False, VALUE=latent_dim,
        BLOCK_V=latent_dim, BLOCK=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out
