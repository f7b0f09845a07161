"""Texts in chunks, taken through layer by layer, so that weights cross the link only once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offplan.runtime.loading.capability import Steps
from offplan.runtime.model.attention import without_cudnn
from offplan.runtime.model.cache_mask import Way
from offplan.runtime.model.caches import ALL
from offplan.runtime.model.layers import Call
from offplan.runtime.passes.forward import Forward


@dataclass(frozen=True)
class Reading:
    """Tokens that a pass reads into rows of the cache, behind what these hold of their text."""

    tokens: torch.Tensor
    """The tokens, int64 of [batch, new] on the device."""
    start: int = 0
    """Tokens of the text that the cache has before them."""
    rows: slice = field(default_factory=lambda: ALL)
    """The rows of the cache, one for each sequence of the batch."""

    @property
    def stop(self) -> int:
        """Tokens of the text once these are read."""
        return self.start + self.tokens.shape[1]


@dataclass
class _Chunk:
    """A chunk on its way: its hidden states so far, and what each layer is called with."""

    hidden: torch.Tensor
    arguments: list[dict[str, Any]]
    """Not the calls: they would keep what the layers are to free."""
    rows: slice
    new: torch.Tensor
    """Positions of its tokens."""
    start: int
    """Tokens of the text before them."""


class ChunkedTexts:
    """The chunks of what a pass reads."""

    def __init__(self, readings: Sequence[Reading], forward: Forward, chunk: int) -> None:
        """Note with what each layer is called for chunks of up to ``chunk`` tokens.

        The model's work ahead of its layers is done, nothing else.
        """
        self._forward, self._layers, self._planned = forward, forward.layers, chunk
        self._readings = readings
        self._chunks: list[list[_Chunk]] = []
        """Chunks of each reading."""
        for reading in readings:
            chunks, start = [], reading.start
            for tokens in reading.tokens.split(chunk, dim=1):
                text = tokens, start, reading.stop, reading.rows
                calls = self._layers.note_calls(partial(forward.chunk, *text, begun=reading.start))
                arguments, new = [call.arguments for call in calls], forward.position.new
                chunks.append(_Chunk(calls[0].hidden, arguments, reading.rows, new, start))
                start += tokens.shape[1]
            self._chunks.append(chunks)

    def run_layer(self, index: int, together: Callable[[Steps], list[torch.Tensor]] | None) -> None:
        """Take every chunk through one layer, one after the other or, by ``together``, at once."""
        every = [chunk for chunks in self._chunks for chunk in chunks]
        if together is None:
            for chunk in every:
                chunk.hidden = self._step(index, chunk)
            return
        with self._layers.compiling():
            steps = [
                (
                    partial(self._run, index, chunk),
                    partial(self._around, chunk),
                )
                for chunk in every
            ]
            for chunk, hidden in zip(every, together(steps), strict=True):
                chunk.hidden = hidden

    def _step(self, index: int, chunk: _Chunk) -> torch.Tensor:
        with self._around(chunk):
            return self._run(index, chunk)

    def _around(self, chunk: _Chunk) -> AbstractContextManager[None]:
        return as_planned(chunk.hidden.shape[-2], chunk.start, self._planned)

    def _run(self, index: int, chunk: _Chunk) -> torch.Tensor:
        self._forward.prepare(chunk.rows, chunk.new, Way.CHUNK, index)
        return self._layers.step(index, Call(chunk.hidden, chunk.arguments[index]))

    def list_hidden(self) -> list[list[torch.Tensor]]:
        """List the hidden states of each reading's chunks, each [batch, some, hidden]."""
        return [[chunk.hidden for chunk in chunks] for chunks in self._chunks]

    def finish(self) -> torch.Tensor:
        """Return the logits of each sequence's last token, [sequences, vocabulary].

        They pass the norm and the head as if the layers had run; the tokens are embedded once more
        on the way.
        """
        logits = [
            self._head(reading, chunks[-1].hidden[..., -1:, :], reading.stop - 1)[:, -1]
            for reading, chunks in zip(self._readings, self._chunks, strict=True)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def finish_all(self, num_last: int, most: int) -> Iterator[torch.Tensor]:
        """Make the logits of the ``num_last`` tokens of the one text, up to ``most`` at a time.

        Each is [batch, some, vocabulary]; they come in order.
        """
        (reading,), (chunks,) = self._readings, self._chunks
        start = reading.start
        for chunk in chunks:
            parts = chunk.hidden.split(most, dim=-2)
            for hidden in parts:
                stop = start + hidden.shape[-2]
                num_wanted = min(hidden.shape[-2], stop - (reading.stop - num_last))
                if num_wanted > 0:
                    yield self._head(reading, hidden[..., -num_wanted:, :], stop - num_wanted)
                start = stop

    def _head(self, reading: Reading, hidden: torch.Tensor, start: int) -> torch.Tensor:
        """Return the logits of the tokens from ``start`` on, whose last hidden states these are."""
        first = start - reading.start
        tokens = reading.tokens[:, first : first + hidden.shape[-2]]
        return self._layers.finish(
            hidden, partial(self._forward.chunk, tokens, start, reading.stop, reading.rows, ALL)
        )


@contextmanager
def as_planned(num_tokens: int, start: int, planned: int) -> Iterator[None]:
    """Have what comes again alone be prepared for: chunks of the plan's size, one behind the other.

    Only these are worth a compilation, and cuDNN's attention, which plans for each shape.
    """
    is_whole = num_tokens == planned
    with torch.compiler.set_stance("default" if is_whole else "force_eager"):
        if is_whole and start % planned == 0:
            yield
            return
        with without_cudnn():
            yield
