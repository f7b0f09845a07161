"""DeepSeek Sparse Attention in blocks, so that it takes no more than a bound in a long context.

Transformers makes keys and values of all heads for every token of the context, and scores of all
tokens of a chunk at once. Beyond a bound both run here in blocks, and results differ by rounding
alone. Of tokens with equal scores torch chooses any, in blocks as in a whole prompt.

Source: transformers 5.23, ``models/deepseek_v32``: ``DeepseekV32Attention`` and
``DeepseekV32Indexer``. The sums over blocks: Milakov and Gimelshein, arXiv 1805.02867.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offplan.runtime.stock.bound import FLOAT32_BYTES, bound_bytes, list_blocks
from offplan.transformers_private import choose_attention

SPARSE_TYPES = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa"})
"""Model types whose attention and indexers are DeepSeek-V3.2's."""
_NAME = "offplan-sparse"


def bound_sparse(model: PreTrainedModel) -> None:
    """Have the attention and the indexers of a model of SPARSE_TYPES run in blocks."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])
    choose_attention(model, _NAME)
    part: Any
    for part in model.modules():
        if hasattr(part, "expand_kv"):
            part.expand_kv = _leave_latents
        if hasattr(part, "index_topk"):
            part.forward = partial(_choose, part.forward)


def _leave_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Hand latents to ``_attend`` in place of keys and values."""
    return latents, rotated


def _attend(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    indices: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the tokens that the indexer chose, as the module's own code does.

    ``query`` is [batch, heads, new, dim], ``latents`` [batch, 1, kept, rank], ``rotated`` [batch,
    1, kept, rotary dim], ``attention_mask`` bool [batch, 1, new, kept], ``indices`` [batch, new,
    chosen]. Returns [batch, new, heads, value dim].
    """
    batch, heads, num_new, _ = query.shape
    num_kept = latents.shape[2]
    seen = attention_mask.new_zeros(batch, 1, num_new, num_kept)
    seen.scatter_(-1, indices[:, None].long(), True).logical_and_(attention_mask)
    # keys, and what keys without a position and values are made in
    of_token = module.qk_head_dim + module.qk_nope_head_dim + module.v_head_dim
    of_token *= batch * heads * query.element_size()
    of_pair = batch * heads * FLOAT32_BYTES
    expand = partial(type(module).expand_kv, module)
    if max(num_kept * of_token, num_new * num_kept * of_pair) <= bound_bytes():
        key, value = expand(latents, rotated)
        own = AttentionInterface()["sdpa"]
        made: torch.Tensor = own(module, query, key, value, seen, scaling=scaling, **kwargs)[0]
        return made, None
    width = max(1, bound_bytes() // of_token)
    rows = max(1, bound_bytes() // (of_pair * width))
    sums = _Sums(query, module.v_head_dim)
    for tokens in list_blocks(num_kept, width):
        key, value = expand(latents[:, :, tokens], rotated[:, :, tokens])
        for block in list_blocks(num_new, rows):
            scores = torch.matmul(query[:, :, block], key.mT).float().mul_(scaling)
            sums.add(block, scores.masked_fill_(~seen[:, :, block, tokens], _LEAST), value)
    return sums.finish(query.dtype).transpose(1, 2), None


_LEAST = torch.finfo(torch.float32).min
"""The score of a token that is not seen; infinite scores would give NaN in a block of such."""


class _Sums:
    """The values of blocks of tokens, weighted as one softmax over all blocks would weigh them."""

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        """Begin with no token for each query, of [batch, heads, new, dim]."""
        shape = query.shape[:-1]
        self._of_values = query.new_zeros(*shape, value_dim, dtype=torch.float32)
        self._of_weights = query.new_zeros(*shape, 1, dtype=torch.float32)
        self._most = query.new_full((*shape, 1), _LEAST, dtype=torch.float32)

    def add(self, block: slice, scores: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens for a block of queries; ``scores`` are overwritten."""
        of_values, of_weights = self._of_values[:, :, block], self._of_weights[:, :, block]
        before = self._most[:, :, block]
        most = torch.maximum(before, scores.amax(-1, keepdim=True))
        lower = (before - most).exp_()
        weights = scores.sub_(most).exp_()
        of_weights.mul_(lower).add_(weights.sum(-1, keepdim=True))
        of_values.mul_(lower).add_(torch.matmul(weights.to(value.dtype), value))
        before.copy_(most)

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weighted mean of the values, [batch, heads, new, value dim]."""
        return self._of_values.div_(self._of_weights).to(dtype)


def _choose(
    own: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    residual: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None,
    past_key_values: Any = None,
) -> torch.Tensor:
    """Choose tokens as an indexer's own code does, for some queries at a time.

    A block of queries puts its own keys into the cache, and sees no later ones: nor would the mask
    show it any. ``attention_mask`` is [batch, new, kept]. Returns int32 [batch, new, chosen].
    """
    batch, num_new, num_kept = attention_mask.shape
    indexer = own.__self__  # type: ignore[attr-defined]
    row_bytes = batch * indexer.n_heads * num_kept * FLOAT32_BYTES
    if past_key_values is None or num_new * row_bytes <= bound_bytes():
        return own(
            hidden,
            residual,
            position_embeddings,
            attention_mask,
            position_ids,
            past_key_values=past_key_values,
        )
    rows = max(1, bound_bytes() // row_bytes)
    # where fewer tokens are there than are chosen all are, the first of them once more
    made = hidden.new_zeros(batch, num_new, min(indexer.index_topk, num_kept), dtype=torch.int32)
    for start in range(0, num_new, rows):
        block = slice(start, min(start + rows, num_new))
        chosen = own(
            hidden[:, block],
            residual[:, block],
            tuple(each[:, block] for each in position_embeddings),
            attention_mask[:, block, : num_kept - num_new + block.stop],
            position_ids,
            past_key_values=past_key_values,
        )
        made[:, block, : chosen.shape[-1]] = chosen
    return made
