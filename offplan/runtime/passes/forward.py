"""The model called on the tokens of one pass, its layers told what the pass is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.errors import InputError
from offplan.runtime.model.cache_mask import Filled, FindFilled, Way, filled_before
from offplan.runtime.model.caches import ALL, Position
from offplan.runtime.model.layers import DecoderLayers
from offplan.transformers_private import choose_attention, name_cache

LAST = slice(-1, None)
"""The tokens that get logits. As a number, 1, Gemma 4 would take it for leave to drop all others
ahead of the layers that share keys. Attention here would not know of that."""


@dataclass
class Forward:
    """Runs every layer of a model, or notes what each of them would be run with.

    Works on the current stream and synchronises nothing; moves no weights, which the executor does.
    """

    module: PreTrainedModel
    layers: DecoderLayers
    position: Position
    """Position at which the filled part of the caches ends."""
    context: int
    """Tokens of each sequence that the caches have room for."""
    find_filled: FindFilled
    """A call says how attention is told what a step reads of the cache."""
    masks_by_kind: bool
    """True if the model takes a mask for each kind of layer, as those with linear attention do."""

    @cached_property
    def _cache_name(self) -> str:
        return name_cache(self.module)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one decode pass of the first rows at their positions.

        ``tokens`` is [batch, 1], or [1, new] of the first row, from its position on. Returns the
        logits of each token, [batch, vocabulary] or [new, vocabulary].
        """
        batch, num_new = tokens.shape
        position = self.position.tensor[:batch, None]
        if num_new > 1:
            position = position + torch.arange(num_new, device=tokens.device)
        new = position[0] if batch == 1 else position
        filled = self.find_filled(position, self.context)
        keep = LAST if num_new == 1 else ALL
        return self._call(tokens, slice(0, batch), new, filled, keep).flatten(0, 1)

    def chunk(
        self,
        tokens: torch.Tensor,
        start: int,
        num_tokens: int,
        rows: slice = ALL,
        keep: slice = LAST,
        begun: int | None = None,
    ) -> torch.Tensor:
        """Run one chunk, [batch, new], of a text of ``num_tokens`` from position ``start`` on.

        Its cache is that of ``rows``. The pass reads the text from ``begun`` on, by default from
        the chunk on. Returns the logits of the tokens ``keep``, [batch, kept, vocabulary].
        """
        new = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        filled = filled_before(start, num_tokens, start if begun is None else begun)
        return self._call(tokens, rows, new, filled, keep)

    def step_layers(self, tokens: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """Return what each layer does in ``step``, to be done again and again until the next pass.

        A call writes the token's row of the cache, or goes on from a state, and leaves nothing else
        behind. No weights are moved: all have to be resident.
        """
        calls = self.layers.note_calls(lambda: self.step(tokens))
        return [partial(self.layers.step, index, call) for index, call in enumerate(calls)]

    def prepare(self, rows: slice, new: torch.Tensor, way: Way, layer: int | None = None) -> None:
        """Tell layers, or one, which rows of the cache are theirs and where new tokens go in them,
        and attention the way to read it.

        Said by each pass for itself: between them measuring notes calls of the other phase.
        """
        self.position.new, self.position.is_chunk = new, way is Way.CHUNK
        if self.layers.cache is not None:
            self.layers.cache.select(rows, layer)
        choose_attention(self.module, way.value)

    def _call(
        self, tokens: torch.Tensor, rows: slice, new: torch.Tensor, filled: Filled, keep: slice
    ) -> torch.Tensor:
        self.prepare(rows, new, filled.way)
        mask: Any = filled.mask
        if self.masks_by_kind:  # to which every token counts; what is no mask must not reach it
            mask = {"full_attention": mask, "linear_attention": None}
        output = self.module(
            input_ids=tokens,
            position_ids=new.expand(tokens.shape[0], -1),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self.layers.cache},
        )
        logits: torch.Tensor = output.logits
        return logits


def require_prompt(prompt: torch.Tensor, context: int) -> None:
    """Raise InputError for a prompt that is empty or beyond the context."""
    batch, num_tokens = prompt.shape
    if not batch or not 0 < num_tokens <= context:
        raise InputError(
            f"the prompt has {num_tokens} tokens in each of {batch} sequences; the plan's "
            f"context is {context}"
        )


def require_step(tokens: torch.Tensor, length: int, batch: int, context: int) -> None:
    """Raise InputError for tokens that are not one for each sequence, or beyond the context.

    ``length`` are the tokens of each; raises ValueError if no sequence is begun.
    """
    if not length:
        raise ValueError("decode before prefill")
    if length >= context:
        raise InputError(f"the sequences have reached the context of {context} tokens")
    if tokens.shape != (batch, 1):
        raise InputError(f"decode wants tokens of shape {(batch, 1)}, found {tuple(tokens.shape)}")
