"""Products of many rows with the values of experts, and the weighted sum over a token's experts.

Rows are sorted by their expert. Programs read on the device where each expert's rows begin, so that
nothing synchronises and a pass can be captured.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def multiply_groups(  # type: ignore[no-untyped-def]
    x, weight, out, starts, bias, first_expert, num_experts, num_out, num_in,
    stride_expert, stride_out, stride_in,
    EXPERTS: tl.constexpr, WHOLE: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes tiles of the products of a group of experts, in turn with the others.

    ``weight`` has the values of the group alone; ``starts`` and ``bias`` are those of all experts.
    ``x`` and ``weight`` are descriptors of [rows, in] and [experts x out, in] if DESCRIBED.
    """
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    firsts = tl.load(starts + first_expert + e, mask=is_expert, other=0)
    stops = tl.load(starts + first_expert + e + 1, mask=is_expert, other=0)
    of_expert = (stops - firsts + BLOCK_M - 1) // BLOCK_M
    across = tl.cdiv(num_out, BLOCK_N)
    ends = tl.cumsum(of_expert, 0) * across
    num_tiles = tl.sum(of_expert, 0) * across
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        own = e == expert
        begin = tl.sum(tl.where(own, firsts, 0), 0)
        stop = tl.sum(tl.where(own, stops, 0), 0)
        blocks = tl.sum(tl.where(own, of_expert, 0), 0)
        within = tile - tl.sum(tl.where(own, ends, 0), 0) + blocks * across
        # programs beside one another read the same rows of the weight
        first_n = within // blocks * BLOCK_N
        begin += within % blocks * BLOCK_M
        n = first_n + tl.arange(0, BLOCK_N)
        m = begin + tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if DESCRIBED:
            first_row = expert * num_out + first_n
            for start in range(0, num_in, BLOCK_K):
                rows = x.load([begin, start])
                columns = weight.load([first_row, start])
                sums = tl.dot(rows, columns.T, sums)
        else:
            # what lies beyond is read again in place of nothing: it needs no mask
            row = tl.minimum(m, stop - 1).to(tl.int64)
            column = tl.minimum(n, num_out - 1)
            at_x = x + row[:, None] * num_in + k[None, :]
            values = weight + tl.cast(expert, tl.int64) * stride_expert
            at_w = values + column[None, :] * stride_out + k[:, None] * stride_in
            for start in range(0, num_in, BLOCK_K):
                if WHOLE:
                    rows = tl.load(at_x)
                    columns = tl.load(at_w)
                else:
                    rows = tl.load(at_x, mask=k[None, :] < num_in - start, other=0.0)
                    columns = tl.load(at_w, mask=k[:, None] < num_in - start, other=0.0)
                sums = tl.dot(rows, columns, sums)
                at_x += BLOCK_K
                at_w += BLOCK_K * stride_in
        if bias is not None:
            own_bias = bias + tl.cast(first_expert + expert, tl.int64) * num_out
            sums += tl.load(own_bias + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
        where = out + m.to(tl.int64)[:, None] * num_out + n[None, :]
        inside = (m < stop)[:, None] & (n < num_out)[None, :]
        tl.store(where, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(  # type: ignore[no-untyped-def]
    made, out, width, limit, factor, added,
    ACT: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK elements of a row, [width], of gates and what they let through.

    A row of ``made`` has them in turn if INTERLEAVED, else all gates first. LIMITED is "before" the
    activation, "after" it or "". All is computed in float32 and rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if INTERLEAVED:
        both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        values = tl.load(made + row * (2 * width) + both, mask=both < 2 * width, other=0.0)
        gate, up = tl.split(tl.reshape(values, [BLOCK, 2]))
    else:
        gate = tl.load(made + row * (2 * width) + at, mask=inside, other=0.0)
        up = tl.load(made + row * (2 * width) + width + at, mask=inside, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    # comparisons let what is no number pass, as torch does
    if LIMITED == "before":
        gate = tl.where(gate > limit, limit, gate)
    if ACT == "gelu":
        gate = 0.5 * gate * (1 + tl.math.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
        gate = gate / (1 + tl.exp(-inner))
    elif ACT == "relu":
        gate = tl.where(gate < 0, 0.0, gate)
    else:
        tl.static_assert(ACT == "silu")
        gate = gate / (1 + tl.exp(-factor * gate))
    if LIMITED == "after":
        gate = tl.where(gate > limit, limit, gate)
    if LIMITED != "":
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gated = gate * (up + added)
    tl.store(out + row * width + at, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_pairs(made, rows, weights, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for BLOCK elements of a token: adds its experts' products, weighted, in float32.

    The product of a pair is the row of ``made``, [tokens x CHOSEN, width], that ``rows`` names, or
    that of the pair's own number. They are added in the order of the token's choices.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        row = pair
        if rows is not None:
            row = tl.load(rows + pair).to(tl.int64)
        w = tl.load(weights + pair).to(tl.float32)
        total += w * tl.load(made + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=inside)
