"""A prompt in chunks, taken through layer by layer, so that weights cross the link only once."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from offplan.runtime.model.filled import Way
from offplan.runtime.model.layers import Call
from offplan.runtime.passes.forward import Forward


class ChunkedPrompt:
    """The chunks of a prompt: their hidden states so far, and what each layer is called with."""

    def __init__(self, chunks: Sequence[torch.Tensor], forward: Forward) -> None:
        """Note with what each layer is called for chunks on the device, each [batch, tokens].

        What the model does ahead of its layers is done, nothing else.
        """
        self._forward, self._layers = forward, forward.layers
        self._planned = chunks[0].shape[1]
        starts = [0, *accumulate(chunk.shape[1] for chunk in chunks)]
        # the head is for the prompt's last token
        last, length = chunks[-1][:, -1:], starts[-1]
        self._forward_last = partial(forward.chunk, last, length - 1, length)
        self._hidden: list[torch.Tensor] = []
        self._arguments: list[list[dict[str, Any]]] = []
        self._rows: list[torch.Tensor] = []
        for chunk, start in zip(chunks, starts, strict=False):
            calls = self._layers.note_calls(partial(forward.chunk, chunk, start, length))
            self._hidden.append(calls[0].hidden)
            # not the calls: they would keep what the layers are to free
            self._arguments.append([call.arguments for call in calls])
            self._rows.append(forward.position.rows)

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
        self._forward.prepare(self._rows[number], Way.CHUNK)
        with as_compiled_for(hidden.shape[-2], self._planned):
            return self._layers.step(index, Call(hidden, self._arguments[number][index]))

    def finish(self) -> torch.Tensor:
        """Return the last token's logits, [batch, vocabulary].

        It passes the norm and the head as if the layers had run; the token is embedded once more on
        the way.
        """
        return self._layers.finish(self._hidden[-1][..., -1:, :], self._forward_last)


def as_compiled_for(num_tokens: int, planned: int) -> Any:
    """Context in which remainders run eagerly: only the plan's chunk is worth a compilation."""
    return torch.compiler.set_stance("default" if num_tokens == planned else "force_eager")
