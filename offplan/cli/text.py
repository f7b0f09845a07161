"""A text that appears on stdout while it is generated."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import TextStreamer

from offplan.checkpoint.model import Model
from offplan.cli.output import printable
from offplan.prompts import find_end_tokens, load_tokenizer, read_prompt


class _Streamer(TextStreamer):
    """Prints text as it is made, which is a model's, and no terminal is to obey it."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


class Text:
    """One prompt and its continuation."""

    def __init__(self, model: Model, prompt: str, *, stream: bool) -> None:
        """Turn ``prompt`` into tokens; ``stream`` prints it and what follows to stdout.

        Raises InputError if the model has no tokenizer, or the prompt no tokens.
        """
        self._tokenizer: Any = load_tokenizer(model)
        self.tokens: torch.Tensor = read_prompt(model, self._tokenizer, prompt)
        """The prompt: int64, [1, tokens]."""
        self.end_tokens = find_end_tokens(model, self._tokenizer)
        self._streamer = _Streamer(self._tokenizer, skip_special_tokens=True) if stream else None

    def follow(self, tokens: Iterable[torch.Tensor]) -> str:
        """Take the tokens that continue the prompt as they come, each int64 of shape [1].

        Returns the continuation as text, without special tokens.
        """
        generated: list[int] = []
        for token in tokens:
            if self._streamer is not None:
                if not generated:
                    self._streamer.put(self.tokens)
                self._streamer.put(token)
            generated.append(int(token[0]))
        if self._streamer is not None:
            self._streamer.end()
        return str(self._tokenizer.decode(generated, skip_special_tokens=True))
