"""Bounds what transformers' own passes take with the context, where their code keeps every score.

DeepSeek-V4's attention copies its one head of keys and values for each head of queries. DeepSeek
Sparse Attention makes keys and values of all heads for every token of the context. Indexers of both
score all tokens of a chunk at once. Beyond BOUND_BYTES all run here in blocks: results differ from
transformers' by rounding alone. Of tokens or blocks with equal scores, as where all heads of the
indexer give 0, torch chooses any, in blocks and in chunks as in a whole prompt.

Source: transformers 5.23, ``models/deepseek_v4``: ``eager_attention_forward`` and
``DeepseekV4IndexerScorer``; ``models/deepseek_v32``: ``DeepseekV32Attention`` and
``DeepseekV32Indexer``. The sums over blocks: Milakov and Gimelshein, arXiv 1805.02867.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offplan.transformers_private import choose_attention

BOUND_BYTES = 2**28
"""Bytes of scores, or of keys and values, that a block makes at most.

A block has one query and one key at least.
"""
FLOAT32_BYTES = 4

_skips = [False]


@contextmanager
def skipping_repeats() -> Iterator[None]:
    """Have ``list_blocks`` leave out blocks that take the memory of the one before them.

    For passes without values, of which only the most memory counts.
    """
    _skips.append(True)
    try:
        yield
    finally:
        _skips.pop()


def list_blocks(length: int, size: int) -> Iterator[slice]:
    """Yield blocks of ``size`` elements, the last one with what remains.

    Where repeats are skipped it yields the first two, the second of which runs beside what is left
    of the first, and the last.
    """
    starts = [*range(0, length, size)]
    if _skips[-1] and len(starts) > 3:
        starts = [*starts[:2], starts[-1]]
    for start in starts:
        yield slice(start, min(start + size, length))


_NAME = "offplan-bounded"
_TYPES = frozenset({"deepseek_v4"})
_SCORER = "DeepseekV4IndexerScorer"


def is_bounded(config: Any) -> bool:
    """Return True if ``bound_by_blocks`` bounds a model's passes, by its transformers config."""
    return config.get_text_config().model_type in _TYPES | SPARSE_TYPES


def bound_by_blocks(model: PreTrainedModel) -> None:
    """Have a model's attention and indexers run in blocks of queries, if its type is known here."""
    if not is_bounded(model.config):
        return
    if model.config.get_text_config().model_type in SPARSE_TYPES:
        bound_sparse(model)
        return
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["eager"])
    choose_attention(model, _NAME)
    part: Any
    for part in model.modules():
        if type(part).__name__ == _SCORER:
            part.forward = partial(_score, part.forward)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the module's own code does, without copies of keys and values for each head.

    ``query`` is [batch, heads, new, dim], ``key`` and ``value`` [batch, 1, kept, dim]. Returns
    [batch, new, heads, dim].
    """
    batch, heads, num_new, dim = query.shape
    num_kept = key.shape[2]
    row_bytes = batch * heads * num_kept * FLOAT32_BYTES
    copied_bytes = batch * heads * num_kept * dim * key.element_size()
    if max(row_bytes * num_new, copied_bytes) <= BOUND_BYTES:
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    rows, made = max(1, BOUND_BYTES // row_bytes), query.new_empty(batch, num_new, heads, dim)
    for block in list_blocks(num_new, rows):
        mask = None if attention_mask is None else attention_mask[:, :, block]
        out = _weigh(query[:, :, block], key, value, mask, module.sinks, scaling)
        made[:, block] = out.transpose(1, 2)
    return made, None


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    batch, heads, num_new, dim = query.shape
    scores = torch.matmul(query.reshape(batch, 1, -1, dim), key.mT) * scaling
    scores = scores.view(batch, heads, num_new, -1)
    if mask is not None:
        scores = scores + mask
    column = sinks.view(1, heads, 1, 1).expand(batch, heads, num_new, 1)
    # sinks stay in float32, and torch's softmax subtracts the largest itself
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(value.dtype)
    out = torch.matmul(weights.reshape(batch, 1, heads * num_new, -1), value)
    return out.view(batch, heads, num_new, dim)


def _score(
    own: Callable[..., torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Score as an indexer's own code does, some queries of a sequence at a time.

    ``query`` is [batch, new, heads, dim], ``keys`` [batch, kept, dim], ``hidden`` [batch, new,
    hidden]. Returns float32 [batch, new, kept].
    """
    batch, num_new, heads, _ = query.shape
    row_bytes = max(1, keys.shape[1] * heads * FLOAT32_BYTES)
    if batch * num_new * row_bytes <= BOUND_BYTES:
        return own(query, keys, hidden)
    rows = max(1, BOUND_BYTES // row_bytes)
    made = query.new_empty(batch, num_new, keys.shape[1], dtype=torch.float32)
    for number in range(batch):
        one = slice(number, number + 1)
        for block in list_blocks(num_new, rows):
            made[one, block] = own(query[one, block], keys[one], hidden[one, block])
    return made


SPARSE_TYPES = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa"})
"""Model types whose attention and indexers are DeepSeek-V3.2's."""
_SPARSE_NAME = "offplan-sparse"


def bound_sparse(model: PreTrainedModel) -> None:
    """Have the attention and the indexers of a model of SPARSE_TYPES run in blocks."""
    AttentionInterface.register(_SPARSE_NAME, _attend_chosen)
    AttentionMaskInterface.register(_SPARSE_NAME, AttentionMaskInterface()["sdpa"])
    choose_attention(model, _SPARSE_NAME)
    part: Any
    for part in model.modules():
        if hasattr(part, "expand_kv"):
            part.expand_kv = _leave_latents
        if hasattr(part, "index_topk"):
            part.forward = partial(_choose, part.forward)


def _leave_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Hand latents to ``_attend_chosen`` in place of keys and values."""
    return latents, rotated


def _attend_chosen(
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
    if max(num_kept * of_token, num_new * num_kept * of_pair) <= BOUND_BYTES:
        key, value = expand(latents, rotated)
        own = AttentionInterface()["sdpa"]
        made: torch.Tensor = own(module, query, key, value, seen, scaling=scaling, **kwargs)[0]
        return made, None
    width = max(1, BOUND_BYTES // of_token)
    rows = max(1, BOUND_BYTES // (of_pair * width))
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
    if past_key_values is None or num_new * row_bytes <= BOUND_BYTES:
        return own(
            hidden,
            residual,
            position_embeddings,
            attention_mask,
            position_ids,
            past_key_values=past_key_values,
        )
    rows = max(1, BOUND_BYTES // row_bytes)
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
