"""The model called on the tokens of one pass, its layers told what the pass is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.runtime.model.caches import Position
from offplan.runtime.model.filled import Filled, FindFilled, Way, filled_before
from offplan.runtime.model.layers import DecoderLayers
from offplan.runtime.transformers_private import choose_attention

LAST = slice(-1, None)
"""The tokens that get logits. As a number, 1, Gemma 4 would take it for leave to drop all others
ahead of the layers that share keys, of which attention here would not know."""


@dataclass
class Forward:
    """Runs every layer of a model, or notes what each of them would be run with.

    Works on the current stream and synchronises nothing; moves no weights, which the executor does.
    """

    module: PreTrainedModel
    layers: DecoderLayers
    position: Position
    """Where the filled part of the caches ends."""
    context: int
    """Tokens of each sequence that the caches have room for."""
    find_filled: FindFilled
    """A call says how attention is told what a step reads of the cache."""
    has_linear: bool
    """Whether some layers have linear attention."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one decode pass at the position on the device; ``tokens`` is [batch, 1].

        Returns logits, [batch, vocabulary].
        """
        position = self.position.tensor
        return self._call(tokens, position, self.find_filled(position, self.context))

    def chunk(self, tokens: torch.Tensor, start: int, num_tokens: int) -> torch.Tensor:
        """Run one chunk, [batch, new], of a prompt of ``num_tokens`` from position ``start`` on.

        Returns the logits of its last token, [batch, vocabulary].
        """
        rows = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return self._call(tokens, rows, filled_before(start, num_tokens))

    def step_layers(self, tokens: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """Return what each layer does in ``step``, to be done again and again until the next pass.

        A call writes the token's row of the cache, or goes on from a state, and leaves nothing else
        behind. No weights are moved: all have to be resident.
        """
        calls = self.layers.note_calls(lambda: self.step(tokens))
        return [partial(self.layers.step, index, call) for index, call in enumerate(calls)]

    def prepare(self, rows: torch.Tensor, way: Way) -> None:
        """Tell layers which rows of the cache to write, [new], and attention the way to read it.

        Said by each pass for itself: between them measuring notes calls of the other phase.
        """
        self.position.rows = rows
        choose_attention(self.module, way.value)

    def _call(self, tokens: torch.Tensor, rows: torch.Tensor, filled: Filled) -> torch.Tensor:
        self.prepare(rows, filled.way)
        mask: Any = filled.mask
        if self.has_linear:  # to which every token counts; what is no mask must not reach it
            mask = {"full_attention": mask, "linear_attention": None}
        output = self.module(
            input_ids=tokens,
            position_ids=rows.expand(tokens.shape[0], -1),
            attention_mask=mask,
            past_key_values=self.layers.cache,
            use_cache=True,
            logits_to_keep=LAST,
        )
        return output.logits[:, -1]
