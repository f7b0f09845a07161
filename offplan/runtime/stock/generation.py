"""A model called as transformers' own ``generate`` calls it, with prompts in chunks or whole."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model_types import STOCK_CHUNKS, STOCK_CHUNKS_WITHOUT_WINDOW
from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    CACHES,
    continue_arguments,
    decoding,
    forget_states,
    name_cache,
)

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


_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}


class StockGeneration:
    """Calls a model as its ``generate`` does: with its own cache, masks and positions.

    Source: transformers 5.23, ``GenerationMixin.generate``, ``_prefill`` and ``_sample``.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, max_tokens: int) -> None:
        """Begin texts of up to ``max_tokens`` with a prompt, int64 of [batch, tokens]."""
        self._model: Any = model
        self._kwargs: dict[str, Any] = {}
        self._taken = inspect.signature(model.forward).parameters.keys()
        self._cache_name = name_cache(model)
        forget_states(model)
        self.text = prompt
        """The tokens so far, int64 of [batch, tokens], on the model's device."""
        mask = {}
        if "attention_mask" in self._taken:
            mask = {"attention_mask": torch.ones_like(prompt)}
        self._model.generate(
            prompt,
            custom_generate=self._take,
            max_length=max_tokens,
            do_sample=False,
            use_cache=True,
            num_beams=1,
            **mask,
        )

    def _take(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Take what ``generate`` would begin its own loop with."""
        self.text, self._kwargs = input_ids, model_kwargs
        return input_ids

    def prefill(self, start: int, stop: int, num_last: int = 1) -> torch.Tensor:
        """Read a chunk of the prompt.

        Returns the logits of its ``num_last`` last tokens, [batch, num_last, vocabulary].
        """
        kwargs, is_whole = self._kwargs, (start, stop) == (0, self.text.shape[1])
        given = dict(kwargs)
        if "logits_to_keep" in given:
            given["logits_to_keep"] = num_last
        if not is_whole:
            if kwargs.get("attention_mask") is not None:
                given["attention_mask"] = kwargs["attention_mask"][:, :stop]
            if kwargs.get("position_ids") is not None:
                given["position_ids"] = kwargs["position_ids"][..., start:stop]
            for key in _TOKEN_TYPES & kwargs.keys():
                given[key] = kwargs[key][..., :stop]
        made = self._call(
            self.text[:, start:stop],
            next_sequence_length=stop if is_whole else None,
            is_first_iteration=True,
            **given,
        )
        if stop < self.text.shape[1]:
            self._kwargs |= {key: value for key, value in made.items() if key in CACHES}
        else:
            self._update(made)
        return _last_logits(made, num_last)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Extend each text by a token, int64 of [batch, 1]; returns logits, [batch, vocabulary]."""
        self.text = torch.cat([self.text, tokens], dim=-1)
        with decoding(self._model):
            made = self._call(self.text, next_sequence_length=1, **self._kwargs)
        self._update(made)
        return _last_logits(made, 1)[:, -1]

    def _call(self, text: torch.Tensor, **given: Any) -> Any:
        """Call the model on what of ``text``, [batch, tokens], its cache does not keep."""
        inputs = self._model.prepare_inputs_for_generation(text, **given)
        has_past = inputs["input_ids"].shape[1] < text.shape[1]
        if has_past and not self.cache_bytes:
            raise refuse(
                f"{type(self._model).__name__} keeps nothing of the tokens that it has read, "
                "and transformers gives it the last one alone"
            )
        # Bamba, Falcon-H1, Nemotron-H and Zamba would keep as many as their configs say
        if given.get("logits_to_keep", 1) > 1:
            inputs["logits_to_keep"] = given["logits_to_keep"]
        # a checkpoint's own code may know the cache by the name of an older transformers
        for key in inputs.keys() & {*CACHES} - self._taken:
            inputs[self._cache_name] = inputs.pop(key)
        return self._model(**inputs, return_dict=True)

    @property
    def cache_bytes(self) -> int:
        """Bytes of what the model keeps of its texts."""
        kept = {id(t): t for key in CACHES for t in tensors_within(self._kwargs.get(key))}
        return sum(tensor.nbytes for tensor in kept.values())

    def has_layers(self, num_layers: int) -> bool:
        """Return True if the cache has a part of its own for each of so many layers."""
        return len(getattr(self.cache, "layers", ())) == num_layers

    def layer_bytes(self, num_layers: int) -> list[int]:
        """Bytes of the cache's part for each layer; what is not in parts is shared out evenly."""
        if not self.has_layers(num_layers):
            return [-(-self.cache_bytes // num_layers)] * num_layers
        parts = [{id(t): t.nbytes for t in tensors_within(each)} for each in self.cache.layers]
        return [sum(part.values()) for part in parts]

    @property
    def cache(self) -> Any:
        """The model's own cache; None before the first pass of some."""
        return next((self._kwargs[key] for key in CACHES if self._kwargs.get(key)), None)

    def _update(self, made: Any) -> None:
        self._kwargs = continue_arguments(self._model, made, self._kwargs)


def _last_logits(made: Any, num_last: int) -> torch.Tensor:
    logits: torch.Tensor = made.logits
    # a view would keep those of all the prompt's tokens
    return logits[:, -num_last:].clone() if logits.shape[1] > num_last else logits


def tensors_within(value: Any) -> list[torch.Tensor]:
    """List the tensors that a cache holds, in whatever lists and objects of transformers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_within([*value.values()])
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_within(each)]
    is_cache = type(value).__module__.startswith("transformers.")
    return tensors_within(vars(value)) if is_cache and hasattr(value, "__dict__") else []
