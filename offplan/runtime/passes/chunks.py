"""A prompt in chunks, taken through layer by layer, so that weights cross the link only once."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from offplan.runtime.model.caches import Position
from offplan.runtime.model.layers import Call, DecoderLayers


class ChunkedPrompt:
    """What the chunks of a prompt bring to each layer, and what layers have made of them so far."""

    def __init__(
        self,
        chunks: Sequence[torch.Tensor],
        forward_chunk: Callable[[torch.Tensor, int, int], Any],
        layers: DecoderLayers,
        position: Position,
    ) -> None:
        """Note with what ``forward_chunk`` calls each layer for chunks, each [batch, tokens].

        It takes a chunk, its first position and the prompt's length, sets ``position.rows`` and
        runs the model. What the model does ahead of its layers is done, nothing else.
        """
        self._layers, self._position = layers, position
        self._planned = chunks[0].shape[1]
        starts = [0, *accumulate(chunk.shape[1] for chunk in chunks)]
        forwards = [
            partial(forward_chunk, chunk, start, starts[-1])
            for chunk, start in zip(chunks, starts, strict=False)
        ]
        # the head is for the prompt's last token
        last, length = chunks[-1][:, -1:], starts[-1]
        self._forward_last = partial(forward_chunk, last, length - 1, length)
        self._hidden: list[torch.Tensor] = []
        self._arguments: list[list[dict[str, Any]]] = []
        self._rows: list[torch.Tensor] = []
        for forward in forwards:
            calls = layers.note_calls(forward)
            self._hidden.append(calls[0].hidden)
            # not the calls: they would keep what the layers are to free
            self._arguments.append([call.arguments for call in calls])
            self._rows.append(position.rows)

    def run_layer(self, index: int) -> None:
        """Take every chunk through one layer."""
        for number in range(len(self._hidden)):
            self._hidden[number] = self._step(index, number)

    def try_layer(self, index: int) -> None:
        """Do the same work, and leave the chunks as they are."""
        for number in range(len(self._hidden)):
            self._step(index, number)

    def _step(self, index: int, number: int) -> torch.Tensor:
        hidden = self._hidden[number]
        self._position.rows = self._rows[number]
        with as_compiled_for(hidden.shape[1], self._planned):
            return self._layers.step(index, Call(hidden, self._arguments[number][index]))

    def finish(self) -> Any:
        """Return what ``forward_chunk`` makes of the last token's hidden state.

        It passes the norm and the head as if the layers had run; the token is embedded once more on
        the way.
        """
        return self._layers.finish(self._hidden[-1][:, -1:], self._forward_last)


def as_compiled_for(num_tokens: int, planned: int) -> Any:
    """A compilation is worth its seconds for the plan's chunk, not for each remainder."""
    return torch.compiler.set_stance("default" if num_tokens == planned else "force_eager")
