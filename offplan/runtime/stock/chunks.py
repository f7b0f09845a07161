"""Prompts of transformers' own passes in chunks: whose may be, and what a cache has behind many."""

from typing import Any

import torch

from offplan.checkpoint.model_types import STOCK_CHUNKS, STOCK_CHUNKS_WITHOUT_WINDOW

BLOCK_TOKENS = 128
"""Tokens that the largest block of DeepSeek-V4's compressed layers stands for."""
_STATES = frozenset({"LinearAttentionLayer", "DummyLayer"})
_WINDOWS = frozenset(
    {
        "DeepseekV4CSACache",
        "DeepseekV4HCACache",
        "DynamicSlidingWindowLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
_WHOLE = frozenset(
    {
        "DynamicIndexedLayer",
        "DynamicLayer",
        "LinearAttentionAndFullAttentionLayer",
        "MiniMaxM3VLSparseCacheLayer",
    }
)
_GROWING = {"keys": -2, "values": -2, "indexer_keys": 1, "idx_keys": -2}
"""Tensors of a layer's cache with a row for each token, by name, and their dimension of tokens.

Source: transformers 5.23, ``cache_utils`` and ``models/minimax_m3_vl``.
"""


def reads_chunks(config: Any) -> bool:
    """Return True if prompts in chunks are known to give what whole ones do, by a transformers
    config.

    Source: ``DynamicCache``, which keeps a window where a config names one, whoever attends to it.
    """
    text = config.get_text_config()
    keys = ("sliding_window", "attention_chunk_size", "layer_types")
    named = [getattr(text, key, None) for key in keys]
    is_windowed = any(named[:2]) or "sliding_attention" in (named[2] or ())
    without = not is_windowed and text.model_type in STOCK_CHUNKS_WITHOUT_WINDOW
    return without or text.model_type in STOCK_CHUNKS


def can_lengthen(cache: Any, num_tokens: int) -> bool:
    """Return True if ``lengthen`` knows each layer of a cache that began as empty.

    It knows no window of more than ``num_tokens``.
    """
    return all(
        type(layer).__name__ in _STATES | _WHOLE
        or (type(layer).__name__ in _WINDOWS and layer.sliding_window <= num_tokens)
        for layer in getattr(cache, "layers", [cache])
    )


def keeps_all(cache: Any) -> bool:
    """Return True if a layer of a cache has a row for every token."""
    return any(type(layer).__name__ in _WHOLE for layer in cache.layers)


def keeps_views(cache: Any) -> bool:
    """Return True if a layer of a cache keeps views of the last chunk: its window."""
    return any(type(layer).__name__ in _WINDOWS for layer in cache.layers)


def lengthen(cache: Any, num_tokens: int) -> None:
    """Give a cache the size that it has after so many tokens more, a multiple of BLOCK_TOKENS.

    Its tensors have no values afterwards. Source: transformers 5.23, ``DeepseekV4HCACache``.
    """
    for layer in cache.layers:
        kind = type(layer).__name__
        if kind in _STATES or not layer.is_initialized:
            continue
        most = layer.sliding_window - 1 if kind in _WINDOWS else None
        for name, dim in _GROWING.items():
            kept = getattr(layer, name, None)
            if kept is not None:
                setattr(layer, name, _widen(kept, dim, num_tokens, most))
        if most is not None:
            layer.cumulative_length += num_tokens
        for name, kept in getattr(layer, "compressed_kv", {}).items():
            more = num_tokens // layer.compress_rate
            layer.compressed_kv[name] = _widen(kept, 1, more, None)
            layer.entry_count[name] += more


def _widen(kept: torch.Tensor, dim: int, more: int, most: int | None) -> torch.Tensor:
    """Return a tensor with so many more tokens in a dimension, of ``most`` in all."""
    width = kept.shape[dim] + more if most is None else min(kept.shape[dim] + more, most)
    shape = list(kept.shape)
    shape[dim] = width
    return kept if shape[dim] == kept.shape[dim] else kept.new_empty(shape)
