"""The kernel by which a step's tokens choose their experts: scores, choice, weights and order."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import LEAST_SHARES

OTHERS = 64
"""Pairs that each pair is compared with at a time, to find its place among them."""
LEAST_SUM = tl.constexpr(1e-20)
"""What routers of sigmoids add to the sum that they divide by, so that it is not zero."""
_LEAST_SHARES = tl.constexpr(LEAST_SHARES)


@triton.jit
def route(  # type: ignore[no-untyped-def]
    logits, bias, weights, indices, order, starts, num_tokens, num_experts, scale,
    SCORE: tl.constexpr, NORMALISES: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """One program for all tokens. Of equal scores the lower expert's is taken first.

    ``SCORE`` says what weights are: shares of the softmax of "all" experts or of the "chosen" ones,
    or a "share" of all or their "sigmoid", to which the choice alone adds ``bias``. ``NORMALISES``
    divides them by their sum, and ``scale`` multiplies them. Of several ``GROUPS`` of experts those
    are looked at whose two best add up to most. A score that is NaN counts as the largest.
    """
    token = tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, e < num_experts
    inside = is_token[:, None] & is_expert[None, :]
    at = logits + token[:, None] * num_experts + e[None, :]
    scores = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(is_token[:, None], scores, 0.0)
    if SCORE == "sigmoid":
        scores = tl.sigmoid(scores)
    if SCORE == "share":
        scores = tl.exp(scores - _of_rows(tl.max(scores, 1), scores))
        scores = tl.div_rn(scores, _of_rows(tl.sum(scores, 1), scores))
    ranked = scores
    if bias is not None:
        ranked += tl.load(bias + e, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    keys = _keys_of(ranked, (EXPERTS - 1 - e)[None, :])
    keys = tl.where(is_expert[None, :], keys, -(1 << 63))
    if GROUPS > 1:
        keys = _keep_groups(keys, e, TOKENS, EXPERTS, GROUPS, CHOSEN_GROUPS)
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
    if SCORE == "sigmoid" or SCORE == "share":
        shares = tl.where((place < CHOSEN)[None, :], found, 0.0)
    else:
        shares = tl.exp(found - largest[:, None])
    if SCORE == "all":
        shares = tl.div_rn(shares, _of_rows(tl.sum(tl.exp(scores - largest[:, None]), 1), shares))
    if NORMALISES:
        total = tl.sum(shares, 1)
        if SCORE == "sigmoid":
            total += LEAST_SUM
        if SCORE == "share":
            total = tl.maximum(total, _LEAST_SHARES)
        shares = tl.div_rn(shares, _of_rows(total, shares))
    shares *= scale
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
def _keys_of(scores, behind):  # type: ignore[no-untyped-def]
    """Make numbers in the order of scores, with what decides between equal ones behind each."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (bits.to(tl.int64) << 32) + behind


@triton.jit
def _scores_of(keys):  # type: ignore[no-untyped-def]
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keep_groups(  # type: ignore[no-untyped-def]
    keys, e, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Have the experts of other groups than the best count as minus infinity."""
    own = tl.reshape(keys, [TOKENS, GROUPS, EXPERTS // GROUPS])
    first = tl.max(own, 2)
    second = tl.max(tl.where(own == first[:, :, None], -(1 << 63), own), 2)
    g = tl.arange(0, GROUPS)
    of_groups = _keys_of(_scores_of(first) + _scores_of(second), (GROUPS - 1 - g)[None, :])
    kept = tl.zeros([TOKENS, GROUPS], tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = of_groups == tl.max(of_groups, 1)[:, None]
        kept += best.to(tl.int32)
        of_groups = tl.where(best, -(1 << 63), of_groups)
    is_kept = tl.broadcast_to(kept[:, :, None], own.shape) > 0
    none = tl.full([TOKENS, EXPERTS], float("-inf"), tl.float32)
    none = _keys_of(none, (EXPERTS - 1 - e)[None, :])
    return tl.where(tl.reshape(is_kept, keys.shape), keys, none)


@triton.jit
def _of_rows(sums, like):  # type: ignore[no-untyped-def]
    """Give each place of a tile its row's number."""
    return tl.broadcast_to(sums[:, None], like.shape)


class Way(NamedTuple):
    """How scores become weights; ``route`` says what they mean."""

    score: str
    normalises: bool = True
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    widens: bool = False
    """True if weights are in float32, whatever the type of scores."""


Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights and experts of each token, and the pairs by expert with where each expert's begin."""


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, num_chosen: int, *way: Any
) -> Choice:
    """Choose experts by their scores, [tokens, experts]; return weights and experts, [tokens, k].

    Returns besides what ``sort_pairs`` makes of the experts: the pairs by expert, and where each
    expert's begin. ``bias`` is [experts], ``way`` the fields of a ``Way``.
    """
    how = Way(*way)
    num_tokens, num_experts = logits.shape
    weights, indices, order, starts = empty_choice(logits, num_chosen, widens=how.widens)
    tokens, most = map(triton.next_power_of_2, (num_tokens, num_chosen))
    experts = triton.next_power_of_2(num_experts)
    route[(1,)](
        logits.contiguous(), bias, weights, indices, order, starts, num_tokens, num_experts,
        how.scale, SCORE=how.score, NORMALISES=how.normalises, GROUPS=how.groups,
        CHOSEN_GROUPS=how.chosen_groups, CHOSEN=num_chosen, EXPERTS=experts, TOKENS=tokens,
        PAIRS=tokens * most, OTHERS=min(OTHERS, tokens * most),
        num_warps=min(8, max(1, tokens * experts // 256)),
    )  # fmt: skip
    return weights, indices, order, starts


def empty_choice(logits: torch.Tensor, num_chosen: int, *, widens: bool) -> Choice:
    """Return room for what ``choose_experts`` returns."""
    num_tokens, num_experts = logits.shape
    dtype = torch.float32 if widens else logits.dtype
    return (
        logits.new_empty(num_tokens, num_chosen, dtype=dtype),
        logits.new_empty(num_tokens, num_chosen, dtype=torch.int64),
        logits.new_empty(num_tokens * num_chosen, dtype=torch.int32),
        logits.new_empty(num_experts + 1, dtype=torch.int32),
    )


_operator = torch.library.custom_op(
    "offplan::choose_experts",
    choose_experts,
    mutates_args=(),
    schema="(Tensor logits, Tensor? bias, int num_chosen, str score, bool normalises, int groups,"
    " int chosen_groups, float scale, bool widens) -> (Tensor, Tensor, Tensor, Tensor)",
)
_operator.register_fake(
    lambda logits, _, num_chosen, *way: empty_choice(logits, num_chosen, widens=Way(*way).widens)
)


def choose(
    logits: torch.Tensor, num_chosen: int, way: Way, bias: torch.Tensor | None = None
) -> Choice:
    """Do what ``choose_experts`` does, which torch.compile passes over."""
    if not torch.compiler.is_compiling():
        return choose_experts(logits, bias, num_chosen, *way)
    made: Choice = _operator(logits, bias, num_chosen, *way)
    return made
