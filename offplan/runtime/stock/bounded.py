"""Bounds what transformers' own passes take with the context, where their code keeps every score.

DeepSeek-V4's attention copies its one head of keys and values for each head of queries. Its indexer
scores all tokens of a chunk at once. Beyond BOUND_BYTES both run here in blocks of queries: results
differ from transformers' by rounding alone. Of blocks with equal scores, as where all heads of the
indexer give 0, torch chooses any, in blocks and in chunks as in a whole prompt.

Source: transformers 5.23, ``models/deepseek_v4``: ``eager_attention_forward`` and
``DeepseekV4IndexerScorer``.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offplan.runtime.stock.bound import FLOAT32_BYTES, bound_bytes, list_blocks
from offplan.runtime.stock.sparse import SPARSE_TYPES, bound_sparse
from offplan.transformers_private import choose_attention

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
    if max(row_bytes * num_new, copied_bytes) <= bound_bytes():
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    rows, made = max(1, bound_bytes() // row_bytes), query.new_empty(batch, num_new, heads, dim)
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
    if batch * num_new * row_bytes <= bound_bytes():
        return own(query, keys, hidden)
    rows = max(1, bound_bytes() // row_bytes)
    made = query.new_empty(batch, num_new, keys.shape[1], dtype=torch.float32)
    for number in range(batch):
        one = slice(number, number + 1)
        for block in list_blocks(num_new, rows):
            made[one, block] = own(query[one, block], keys[one], hidden[one, block])
    return made
