"""Attention whose scores are softly capped, or beside whose scores a learned sink stands.

No kernel of torch's scaled dot-product attention has either; its compiled attention has both.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from offplan.runtime.model.filled import BLOCK_TOKENS


def weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from one new token, as transformers' own attentions do.

    ``query`` is [batch, kv_heads, heads of each, dim], ``key`` and ``value`` [batch, kv_heads,
    kept, dim], ``mask`` bool of [1, 1, 1, kept], ``sinks`` [heads]. Source: transformers 5.23,
    ``eager_attention_forward`` of Gemma2 and GptOss.
    """
    scores = torch.matmul(query, key.mT).float() * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, *query.shape[1:3], 1).expand(len(query), -1, -1, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return torch.matmul(weights.to(value.dtype), value)


def attend_scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the last tokens of a text to all up to each one's own.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, kv_heads, kept, dim], of
    which each token sees the last ``window``; ``sinks`` is [heads]. A sink takes its share of the
    softmax and gives nothing: what is left of the others is a sigmoid of how far they exceed it.
    """
    attend = _compiled() if query.is_cuda else _attend
    out, sums = attend(
        query,
        key,
        value,
        score_mod=_cap_by(soft_cap),
        block_mask=_mask_up_to_own(query.shape[2], key.shape[2], window, query.device),
        scale=scaling,
        enable_gqa=True,
        return_lse=True,
    )
    if sinks is not None:
        out = out * torch.sigmoid(sums - sinks.float().view(-1, 1)).unsqueeze(-1).to(out.dtype)
    made: torch.Tensor = out
    return made


_attend: Callable[..., Any] = flex_attention


@cache
def _compiled() -> Callable[..., Any]:
    """Compile attention once for all lengths."""
    return torch.compile(_attend, dynamic=True)


@cache
def _cap_by(soft_cap: float | None) -> Callable[..., torch.Tensor] | None:
    """Return what caps a score; one function for each cap, for which attention is compiled."""
    if soft_cap is None:
        return None

    def cap(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap


def _mask_up_to_own(
    num_new: int, num_kept: int, window: int | None, device: torch.device
) -> BlockMask:
    """Make the blocks that tokens see of those up to each one's own, the last ones of the kept."""
    offset = torch.tensor(num_kept - num_new, device=device)
    reach = torch.tensor(num_kept if window is None else window, device=device)

    def sees(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        behind = query + offset - key
        return (behind >= 0) & (behind < reach)

    first_query = torch.arange(0, num_new, BLOCK_TOKENS, device=device)[:, None] + offset
    first_key = torch.arange(0, num_kept, BLOCK_TOKENS, device=device)[None, :]
    behind = first_query - first_key
    some = (behind > -BLOCK_TOKENS) & (behind < reach + BLOCK_TOKENS)
    number = some.sum(-1, dtype=torch.int32)
    order = torch.argsort(~some, dim=-1, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        number[None, None],
        order[None, None],
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=sees,
        seq_lengths=(num_new, num_kept),
    )
