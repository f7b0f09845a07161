"""Attention whose scores are softly capped, or beside whose scores a learned sink stands.

No kernel of torch's scaled dot-product attention has either; its compiled attention has both.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from offplan.runtime.model.filled import BLOCK_TOKENS


def weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend by whole products, as transformers' own attentions do.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, kv_heads, kept, dim].
    ``mask`` is bool of [new, kept] or [batch, 1, 1, kept], ``sinks`` [heads]. Returns [batch,
    heads, new, dim]. Source: transformers 5.23, ``eager_attention_forward`` of Gemma2 and GptOss.
    """
    batch, heads, num_new, dim = query.shape
    kv_heads, num_kept = key.shape[1:3]
    # the queries of a KV group are rows of one product
    products = torch.matmul(query.reshape(batch, kv_heads, -1, dim), key.mT)
    scores = products.view(batch, heads, num_new, num_kept).float()
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, num_new, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :num_kept].to(value.dtype)
    out = torch.matmul(weights.reshape(batch, kv_heads, -1, num_kept), value)
    return out.view(batch, heads, num_new, value.shape[-1])


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the last tokens of a text to all up to each one's own, compiled, on a GPU.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, kv_heads, kept, dim], of
    which each token sees the last ``window``; ``sinks`` is [heads]. A sink takes its share of the
    softmax and gives nothing. The share left of the others is a sigmoid of how far they exceed it.
    """
    # uncompiled, as other parts of some passes run, it would hold every score
    with torch.compiler.set_stance("default"):
        out, found = _compiled()(
            query,
            key,
            value,
            score_mod=None if soft_cap is None else _cap_by(soft_cap, query.device),
            block_mask=_mask_up_to_own(query.shape[2], key.shape[2], window, query.device),
            scale=scaling,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    if sinks is not None:
        share = torch.sigmoid(found.lse - sinks.float().view(-1, 1)).unsqueeze(-1)
        out = out * share.to(out.dtype)
    made: torch.Tensor = out
    return made


@cache
def _compiled() -> Callable[..., Any]:
    """Compile attention once for all lengths."""
    attend: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return attend


def _cap_by(soft_cap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return what caps a score. Lengths and caps are tensors: attention is compiled for any."""
    cap = torch.full((), soft_cap, device=device)

    def cap_softly(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return cap_softly


def _mask_up_to_own(
    num_new: int, num_kept: int, window: int | None, device: torch.device
) -> BlockMask:
    """Make the blocks that tokens see of those up to each one's own, the last ones of the kept."""
    offset = torch.full((), num_kept - num_new, device=device)
    reach = torch.full((), num_kept if window is None else window, device=device)

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
