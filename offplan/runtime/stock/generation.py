"""A model called as transformers' own ``generate`` calls it."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    CACHES,
    continue_arguments,
    decoding,
    forget_states,
    name_cache,
)

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
