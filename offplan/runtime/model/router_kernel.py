"""The kernel by which a step's tokens choose their experts: scores, choice, weights and order."""

import torch
import triton
import triton.language as tl

OTHERS = 64
"""Pairs that each pair is compared with at a time, to find its place among them."""


@triton.jit
def route(  # type: ignore[no-untyped-def]
    logits, weights, indices, order, starts, num_tokens, num_experts,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
    OF_ALL: tl.constexpr, NORMALISES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """One program for all tokens. Of equal scores the lower expert's is taken first.

    ``OF_ALL`` takes shares of the softmax over all experts, which ``NORMALISES`` divides by their
    sum; without it the softmax is over the chosen ones. A score that is NaN counts as the largest.
    """
    token = tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, e < num_experts
    inside = is_token[:, None] & is_expert[None, :]
    at = logits + token[:, None] * num_experts + e[None, :]
    scores = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(is_token[:, None], scores, 0.0)
    # numbers in the order of scores; behind each its expert's, the lowest as the largest
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (bits.to(tl.int64) << 32) + (EXPERTS - 1 - e)[None, :]
    keys = tl.where(is_expert[None, :], keys, -(1 << 63))
    largest = tl.max(scores, 1)
    place = tl.arange(0, PAIRS // TOKENS)
    chosen = tl.zeros([TOKENS, PAIRS // TOKENS], tl.int32)
    found = tl.full([TOKENS, PAIRS // TOKENS], float("-inf"), tl.float32)
    for n in tl.static_range(CHOSEN):
        key = tl.max(keys, 1)
        expert = EXPERTS - 1 - (key & 0xFFFFFFFF).to(tl.int32)
        is_own = e[None, :] == expert[:, None]
        score = tl.sum(tl.where(is_own, scores, 0.0), 1)
        keys = tl.where(is_own, -(1 << 63), keys)
        chosen = tl.where((place == n)[None, :], expert[:, None], chosen)
        found = tl.where((place == n)[None, :], score[:, None], found)
    shares = tl.exp(found - largest[:, None])
    if OF_ALL:
        shares = tl.div_rn(shares, _of_rows(tl.sum(tl.exp(scores - largest[:, None]), 1), shares))
    if NORMALISES or not OF_ALL:
        shares = tl.div_rn(shares, _of_rows(tl.sum(shares, 1), shares))
    is_pair = is_token[:, None] & (place < CHOSEN)[None, :]
    pair = token[:, None] * CHOSEN + place[None, :]
    tl.store(weights + pair, shares.to(weights.dtype.element_ty), mask=is_pair)
    tl.store(indices + pair, chosen.to(tl.int64), mask=is_pair)
    tl.debug_barrier()  # other threads read what was stored
    num_pairs = num_tokens * CHOSEN
    p = tl.arange(0, PAIRS)
    own = tl.load(indices + p, mask=p < num_pairs, other=num_experts).to(tl.int32)
    before = tl.zeros([PAIRS], tl.int32)
    first = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_pairs, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        theirs = tl.load(indices + other, mask=other < num_pairs, other=num_experts).to(tl.int32)
        is_before = (theirs[None, :] < own[:, None]) | (
            (theirs[None, :] == own[:, None]) & (other[None, :] < p[:, None])
        )
        before += tl.sum(is_before.to(tl.int32), 1)
        first += tl.sum((theirs[None, :] < e[:, None]).to(tl.int32), 1)
    tl.store(order + before, p, mask=p < num_pairs)
    tl.store(starts + e, first, mask=is_expert)
    tl.store(starts + num_experts, num_pairs)


@triton.jit
def _of_rows(sums, like):  # type: ignore[no-untyped-def]
    """Give each place of a tile its row's number."""
    return tl.broadcast_to(sums[:, None], like.shape)


def choose_experts(
    logits: torch.Tensor, num_chosen: int, of_all: bool, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose experts by their scores, [tokens, experts]; return weights and experts, [tokens, k].

    Weights are of the scores' type. Returns besides what ``sort_pairs`` makes of the experts: the
    pairs by expert, and where each expert's begin. ``route`` says what the other arguments mean.
    """
    num_tokens, num_experts = logits.shape
    weights, indices, order, starts = empty_choice(logits, num_chosen)
    tokens, most = map(triton.next_power_of_2, (num_tokens, num_chosen))
    experts = triton.next_power_of_2(num_experts)
    route[(1,)](
        logits.contiguous(), weights, indices, order, starts, num_tokens, num_experts,
        CHOSEN=num_chosen, EXPERTS=experts, TOKENS=tokens, PAIRS=tokens * most,
        OF_ALL=of_all, NORMALISES=normalises, OTHERS=min(OTHERS, tokens * most),
        num_warps=min(8, max(1, tokens * experts // 256)),
    )  # fmt: skip
    return weights, indices, order, starts


Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights and experts of each token, and the pairs by expert with where each expert's begin."""


def empty_choice(logits: torch.Tensor, num_chosen: int) -> Choice:
    """Return room for what ``choose_experts`` returns."""
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty(num_tokens, num_chosen),
        logits.new_empty(num_tokens, num_chosen, dtype=torch.int64),
        logits.new_empty(num_tokens * num_chosen, dtype=torch.int32),
        logits.new_empty(num_experts + 1, dtype=torch.int32),
    )


_operator = torch.library.custom_op(
    "offplan::choose_experts",
    choose_experts,
    mutates_args=(),
    schema="(Tensor logits, int num_chosen, bool of_all, bool normalises)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_operator.register_fake(lambda logits, num_chosen, *_: empty_choice(logits, num_chosen))


def choose(
    logits: torch.Tensor, num_chosen: int, of_all: bool, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``choose_experts`` does, which torch.compile passes over."""
    if not torch.compiler.is_compiling():
        return choose_experts(logits, num_chosen, of_all, normalises)
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _operator(
        logits, num_chosen, of_all, normalises
    )
    return made
