"""The gated delta rule for many tokens by two kernels, in place of several for each chunk.

The first kernel solves the triangular systems of all chunks at once. The second kernel takes chunk
after chunk; each of its programs keeps some columns of a head's state in registers.

Products of float32 have three terms in TF32, whose error is as small as float32's; GPUs without
TF32 multiply in float32. The first kernel inverts each system's matrix, unit lower triangular,
block by block; blocks double each time. Of blocks A and B on the diagonal and C below A, the
inverse has -B^-1 C A^-1 in the place of C.

Source: Gated DeltaNet (arXiv 2412.06464); its form by chunks as in ``torch_chunk_gated_delta_rule``
of transformers 5.23; the idea of one kernel for all chunks of flash-linear-attention.
"""

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import RULE_CHUNK as CHUNK

SOLVED_DIMS = 32
"""Elements of keys or values that a program of the first kernel takes at a time, at most."""
STATE_KEYS, STATE_VALUES = 64, 16
"""Elements of a key and of a value in one product of the second kernel."""
OF_PROMPTS = ("num_tokens", "num_chunks")
"""Arguments that differ from prompt to prompt, for which Triton compiles no kernel again."""


@triton.jit
def _dot(a, b):  # type: ignore[no-untyped-def]
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _load_part(  # type: ignore[no-untyped-def]
    vectors, token, dim, token_stride, dim_stride, num_tokens, num_dims
):
    """Load some elements of tokens' vectors; those behind the last token or element are zero."""
    inside = (token < num_tokens)[:, None] & (dim < num_dims)[None, :]
    at = vectors + token[:, None] * token_stride + dim[None, :] * dim_stride
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=OF_PROMPTS)
def solve_chunk(  # type: ignore[no-untyped-def]
    query, key, value, decays, rates, queries, keys, seen_keys, new_values, pairs, kept,
    num_tokens, num_heads, share, key_dim, value_dim, num_chunks, scale, epsilon,
    query_batch, query_token, query_head, query_step, key_batch, key_token, key_head, key_step,
    value_batch, value_token, value_head, value_step,
    decay_batch, decay_token, decay_head, rate_batch, rate_token, rate_head,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program for a value head of a sequence and one of its chunks.

    Tokens behind the last one are zero and decay nothing. Outputs are float32 and contiguous. They
    are by head and chunk: ``queries``, ``seen_keys`` [chunk, KEYS], ``keys`` [KEYS, chunk],
    ``new_values`` [chunk, VALUES], ``pairs`` [chunk, chunk], ``kept`` a number.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = (row // num_heads).to(tl.int64), row % num_heads
    place = tl.arange(0, CHUNK)
    token = chunk * CHUNK + place
    is_token = token < num_tokens
    query += batch * query_batch + (head // share) * query_head
    key += batch * key_batch + (head // share) * key_head
    value += batch * value_batch + head * value_head
    decays += batch * decay_batch + head * decay_head
    rates += batch * rate_batch + head * rate_head
    decay = tl.load(decays + token * decay_token, mask=is_token, other=0.0).to(tl.float32)
    decay = tl.cumsum(decay, 0)
    rate = tl.load(rates + token * rate_token, mask=is_token, other=0.0).to(tl.float32)

    of_keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_queries = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, KEYS, BLOCK_K):
        dim = begin + tl.arange(0, BLOCK_K)
        k = _load_part(key, token, dim, key_token, key_step, num_tokens, key_dim)
        q = _load_part(query, token, dim, query_token, query_step, num_tokens, key_dim)
        key_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        query_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        of_keys += _dot(k, tl.trans(k))
        of_queries += _dot(q, tl.trans(k))
    of_key = tl.rsqrt(key_squares + epsilon)
    of_query = tl.rsqrt(query_squares + epsilon) * scale

    # of a token and those up to it, never more than 1
    is_before = place[:, None] >= place[None, :]
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    first = row.to(tl.int64) * num_chunks + chunk
    pairs += first * CHUNK * CHUNK
    at = place[:, None] * CHUNK + place[None, :]
    tl.store(pairs + at, of_queries * between * of_query[:, None] * of_key[None, :])
    below = of_keys * between * (rate * of_key)[:, None] * of_key[None, :]

    corner = (place[:, None] % 2 == 1) & (place[None, :] == place[:, None] - 1)
    inverse = (place[:, None] == place[None, :]).to(tl.float32) - tl.where(corner, below, 0.0)
    size = 2
    while size < CHUNK:
        block, other = place[:, None] // size, place[None, :] // size
        corner = (block % 2 == 1) & (other == block - 1)
        inverse -= _dot(_dot(inverse, tl.where(corner, below, 0.0)), inverse)
        size *= 2

    last = tl.sum(tl.where(place == CHUNK - 1, decay, 0.0), 0)
    tl.store(kept + first, tl.exp(last))
    grown, left = tl.exp(decay), tl.exp(last - decay)
    queries += first * CHUNK * KEYS
    keys += first * CHUNK * KEYS
    seen_keys += first * CHUNK * KEYS
    new_values += first * CHUNK * VALUES
    for begin in range(0, KEYS, BLOCK_K):
        dim = begin + tl.arange(0, BLOCK_K)
        by_token = place[:, None] * KEYS + dim[None, :]
        read = _load_part(query, token, dim, query_token, query_step, num_tokens, key_dim)
        tl.store(queries + by_token, read.to(tl.float32) * (of_query * grown)[:, None])
        own = _load_part(key, token, dim, key_token, key_step, num_tokens, key_dim)
        own = own.to(tl.float32) * of_key[:, None]
        tl.store(keys + dim[None, :] * CHUNK + place[:, None], own * left[:, None])
        tl.store(seen_keys + by_token, _dot(inverse, own * (rate * grown)[:, None]))
    for begin in range(0, VALUES, BLOCK_V):
        dim = begin + tl.arange(0, BLOCK_V)
        new = _load_part(value, token, dim, value_token, value_step, num_tokens, value_dim)
        solved = new_values + place[:, None] * VALUES + dim[None, :]
        tl.store(solved, _dot(inverse, new.to(tl.float32) * rate[:, None]))


@triton.jit(do_not_specialize=OF_PROMPTS)
def scan_chunks(  # type: ignore[no-untyped-def]
    queries, keys, seen_keys, new_values, pairs, kept, initial, final, out,
    num_tokens, num_heads, key_dim, value_dim, num_chunks,
    HAS_INITIAL: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program for a value head of a sequence and a block of its values.

    ``initial`` and ``final`` are states, [batch x heads, key dim, value dim], and ``out`` is
    [batch, tokens, heads, value dim]. The other tensors are those that ``solve_chunk`` wrote.
    """
    row = tl.program_id(0)
    batch, head = (row // num_heads).to(tl.int64), row % num_heads
    first = row.to(tl.int64) * num_chunks
    queries += first * CHUNK * KEYS
    keys += first * CHUNK * KEYS
    seen_keys += first * CHUNK * KEYS
    new_values += first * CHUNK * VALUES
    pairs += first * CHUNK * CHUNK
    kept += first
    out += (batch * num_tokens * num_heads + head) * value_dim
    initial += row.to(tl.int64) * key_dim * value_dim
    final += row.to(tl.int64) * key_dim * value_dim
    place, dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = (v < value_dim)[None, :]
    of_state = dim[:, None] * value_dim + v[None, :]
    states = ()  # of BLOCK_K keys each: a product with all would take more registers than there are
    for part in tl.static_range(KEYS // BLOCK_K):
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if HAS_INITIAL:
            where = initial + part * BLOCK_K * value_dim + of_state
            is_state = (part * BLOCK_K + dim < key_dim)[:, None] & is_value
            state += tl.load(where, mask=is_state, other=0.0).to(tl.float32)
        states += (state,)  # type: ignore[assignment]
    for chunk in range(num_chunks):
        before = chunk * CHUNK  # tokens
        at = (before + place)[:, None]
        deltas = tl.load(new_values + at * VALUES + v[None, :])
        made = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for part in tl.static_range(KEYS // BLOCK_K):
            k = part * BLOCK_K + dim[None, :]
            deltas -= _dot(tl.load(seen_keys + at * KEYS + k), states[part])
            made += _dot(tl.load(queries + at * KEYS + k), states[part])
        made += _dot(tl.load(pairs + at * CHUNK + place[None, :]), deltas)
        to = out + at * (num_heads * value_dim) + v[None, :]
        tl.store(to, made.to(out.dtype.element_ty), mask=(at < num_tokens) & is_value)
        left, after = tl.load(kept + chunk), ()
        for part in tl.static_range(KEYS // BLOCK_K):
            by_key = (part * BLOCK_K + dim)[:, None] * CHUNK + place[None, :]
            own = tl.load(keys + before * KEYS + by_key)
            after += (states[part] * left + _dot(own, deltas),)  # type: ignore[assignment]
        states = after
    for part in tl.static_range(KEYS // BLOCK_K):
        is_state = (part * BLOCK_K + dim < key_dim)[:, None] & is_value
        tl.store(final + part * BLOCK_K * value_dim + of_state, states[part], mask=is_state)


def scanning_options(keys: int) -> dict[str, int]:
    """Return what the second kernel is compiled with for states of so many keys, a power of two.

    Two stages read a chunk while the one before is multiplied. Source: triton 3.7's kernels for
    compute capabilities 8.0 to 12.0, whose two stages of 128 keys share 62 KiB, and of 256 110 KiB.
    """
    return {"num_warps": 4, "num_stages": 2} if keys <= 128 else {"num_warps": 8, "num_stages": 1}


def take_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what transformers' rule for many tokens does, which normalises queries and keys.

    Arguments are those of that rule, [batch, tokens, heads, ...], in any strides; ``epsilon`` is
    added to squared norms. Returns what tokens read, as ``value``, and the states behind them,
    float32 of [batch, value heads, key dim, value dim]. Runs on the current stream, synchronises
    nothing.
    """
    batch, num_tokens, num_heads, value_dim = value.shape
    key_dim, num_rows = key.shape[-1], batch * num_heads
    num_chunks = triton.cdiv(num_tokens, CHUNK)
    keys, values = map(triton.next_power_of_2, (key_dim, value_dim))

    def make_room(*size: int) -> torch.Tensor:
        return value.new_empty(num_rows, num_chunks, *size, dtype=torch.float32)

    queries, seen_keys, ended_keys = (make_room(CHUNK, keys) for _ in range(3))
    new_values, pairs, kept = make_room(CHUNK, values), make_room(CHUNK, CHUNK), make_room()
    solved = (queries, ended_keys, seen_keys, new_values, pairs, kept)
    solve_chunk[(num_rows, num_chunks)](
        query, key, value, g, beta, *solved,
        num_tokens, num_heads, num_heads // key.shape[2], key_dim, value_dim, num_chunks,
        key_dim**-0.5, epsilon,
        *query.stride(), *key.stride(), *value.stride(), *g.stride(), *beta.stride(),
        KEYS=keys, VALUES=values, CHUNK=CHUNK, BLOCK_K=min(keys, SOLVED_DIMS),
        BLOCK_V=min(values, SOLVED_DIMS), num_warps=4,
    )  # fmt: skip
    made = value.new_empty(value.shape)
    states = value.new_empty(batch, num_heads, key_dim, value_dim, dtype=torch.float32)
    given = states if initial_state is None else initial_state.contiguous()
    scan_chunks[(num_rows, triton.cdiv(value_dim, STATE_VALUES))](
        *solved, given, states, made,
        num_tokens, num_heads, key_dim, value_dim, num_chunks,
        HAS_INITIAL=initial_state is not None, KEYS=keys, VALUES=values, CHUNK=CHUNK,
        BLOCK_K=min(keys, STATE_KEYS), BLOCK_V=STATE_VALUES, **scanning_options(keys),
    )  # fmt: skip
    return made, states
