"""Rotary embeddings whose frequencies change with the length of the text.

transformers reads the length off each pass's positions, on the device. A captured pass cannot ask
for it, and a chunk of a prompt does not show it. Here the host, which knows it, writes what a pass
reads ahead of the pass. Keys that are cached keep the frequencies of their own pass, as they do in
transformers' ``generate``. Source: transformers 5.23, ``modeling_rope_utils`` and
``PhimoeRotaryEmbedding``.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from offplan.runtime.refusal import refuse
from offplan.transformers_private import (
    Phi3RotaryEmbedding,
    PhimoeRotaryEmbedding,
    changes_by_positions,
    compute_frequencies,
)

RENEWING = ("phi3", "phimoe")
"""Model types whose whole text is read again once it outgrows ``original_max_position_embeddings``.

Source: transformers 5.23, ``Phi3ForCausalLM.prepare_inputs_for_generation``.
"""


def hold_frequencies(model: PreTrainedModel) -> None:
    """Have a model's rotary embeddings read frequencies as they are, whatever the positions.

    Raises CheckpointError for a model that treats a change of them in a way of its own.
    """
    for module in _find_changing(model):
        is_phimoe = isinstance(module, PhimoeRotaryEmbedding)
        # Phimoe makes its tables on the host, in each pass
        forward = inspect.unwrap((Phi3RotaryEmbedding if is_phimoe else type(module)).forward)
        prepare = type(model).prepare_inputs_for_generation
        is_own = prepare is not GenerationMixin.prepare_inputs_for_generation
        if (
            "config" in forward.__code__.co_names
            or (is_own and model.config.model_type not in RENEWING)
            or (is_phimoe and module.rope_type not in ("default", "longrope"))
        ):
            raise refuse(
                f"{type(model).__name__} has rotary embeddings that change with the text's length "
                "in a way of its own"
            )
        module.forward = MethodType(forward, module)


class Frequencies:
    """The parts of a loaded model's rotary embeddings that change; works on the current stream."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find what changes in ``model``, whose buffers have their values."""
        self._changing = [part for module in _find_changing(model) for part in _changes(module)]
        renews = self._changing and model.config.model_type in RENEWING
        self.renewal = model.config.original_max_position_embeddings + 1 if renews else 0
        """Tokens of a text that is to be read again as a whole once it has grown to so many; 0
        if none is."""

    def invalidate(self) -> None:
        """Know of no length that anything was written for."""
        for each in self._changing:
            each.invalidate()

    @property
    def change(self) -> bool:
        """True if there is anything that changes."""
        return bool(self._changing)

    def regime(self, num_tokens: int) -> tuple[int, ...]:
        """Return what texts of one pass have to share, of the length of each."""
        return tuple(each.length_for(num_tokens) for each in self._changing)

    def set_length(self, num_tokens: int) -> None:
        """Write what a pass reads whose last token is the text's ``num_tokens``-th."""
        for each in self._changing:
            each.set_length(num_tokens)


_UNKNOWN = -1


class _Changing:
    """A tensor that a rotary embedding reads, and its values by the length of the text."""

    def __init__(
        self,
        read: torch.Tensor,
        limit: int,
        compute: Callable[[int], torch.Tensor],
        *,
        grows: bool,
    ) -> None:
        """Keep ``read`` as it is for texts of ``limit`` tokens.

        For longer ones ``compute`` gives its values on the host, for each length where it
        ``grows``, else once for all.
        """
        self._read, self._limit, self._compute, self._grows = read, limit, compute, grows
        self._short = read.cpu().clone()
        self._length = _UNKNOWN
        """Length that it was written for; 0 for texts up to the limit."""

    def invalidate(self) -> None:
        """Know of no length that it was written for."""
        self._length = _UNKNOWN

    def length_for(self, num_tokens: int) -> int:
        """Return the length by which a text of so many tokens has its values; 0 up to the limit."""
        longer = num_tokens if self._grows else self._limit + 1
        return longer if num_tokens > self._limit else 0

    def set_length(self, num_tokens: int) -> None:
        """Write the values for a text of so many tokens, unless they are there."""
        length = self.length_for(num_tokens)
        if length == self._length:
            return
        values = self._compute(length) if length else self._short
        if self._read.is_cuda:
            values = values.pin_memory()  # or the copy would wait for the device
        self._read.copy_(values, non_blocking=True)
        self._length = length


def _find_changing(model: torch.nn.Module) -> list[Any]:
    """Find the rotary embeddings that transformers changes, or computes anew, in a pass."""
    return [
        module
        for module in model.modules()
        if isinstance(module, PhimoeRotaryEmbedding) or _changing_types(module)
    ]


def _changing_types(module: Any) -> dict[str | None, str]:
    """Return a rotary embedding's types that change, by the layers' type; None for all layers."""
    types = getattr(module, "rope_type", {})
    types = types if isinstance(types, dict) else {None: types}
    changing = {layers: each for layers, each in types.items() if _changes_by_length(each)}
    return changing if changing and changes_by_positions(module) else {}


def _changes_by_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _changes(module: Any) -> Iterator[_Changing]:
    """Find each tensor that changes in a rotary embedding."""
    rope = module.config.rope_parameters
    if isinstance(module, PhimoeRotaryEmbedding):
        if module.rope_type != "default":  # the scale changes, and frequencies never
            scale, long = torch.tensor([rope["short_mscale"], rope["long_mscale"]])
            module.attention_scaling = scale.to(module.inv_freq.device)
            limit = rope["original_max_position_embeddings"]
            yield _Changing(module.attention_scaling, limit, lambda _: long, grows=False)
        return
    for layer_type, rope_type in _changing_types(module).items():
        prefix, own = ("", rope) if layer_type is None else (f"{layer_type}_", rope[layer_type])
        grows = "dynamic" in rope_type
        yield _Changing(
            getattr(module, f"{prefix}inv_freq"),
            module.original_max_seq_len if grows else own["original_max_position_embeddings"],
            partial(compute_frequencies, module.config, rope_type, layer_type),
            grows=grows,
        )
