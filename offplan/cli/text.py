"""A prompt as tokens, and tokens as text that appears while it is generated."""

import contextlib
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, TextStreamer

from offplan.checkpoint.config import text_config
from offplan.checkpoint.model import Model
from offplan.errors import InputError


class Text:
    """One prompt and its continuation."""

    def __init__(self, model: Model, prompt: str, *, stream: bool) -> None:
        """Turn ``prompt`` into tokens; ``stream`` prints it and what follows to stdout.

        Raises InputError if the model has no tokenizer, or the prompt no tokens.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model.source,
                revision=model.revision or "main",
                trust_remote_code=False,  # left open, it would ask on the terminal
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{model.source} has no tokenizer for --prompt: {reason}") from None
        self.tokens: torch.Tensor = self._tokenizer(prompt, return_tensors="pt").input_ids
        """int64, [1, tokens]."""
        if not self.tokens.numel():
            raise InputError("the prompt is empty: type some text, or leave --prompt out")
        self.stop_tokens = _stop_tokens(model, self._tokenizer)
        self._generated: list[int] = []
        self._streamer: Any = None
        if stream:
            self._streamer = TextStreamer(self._tokenizer, skip_special_tokens=True)

    def add(self, token: torch.Tensor) -> None:
        """Append a token, int64 of shape [1]."""
        if self._streamer is not None:
            if not self._generated:
                self._streamer.put(self.tokens)
            self._streamer.put(token)
        self._generated.append(int(token[0]))

    def end(self) -> None:
        """Print what is left of the last word."""
        if self._streamer is not None:
            self._streamer.end()

    @property
    def generated(self) -> str:
        """The continuation without special tokens."""
        return str(self._tokenizer.decode(self._generated, skip_special_tokens=True))


def _stop_tokens(model: Model, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, by the model's generation config, its config and its tokenizer."""
    configs = model.config, text_config(model.config)
    named = [*(config.get("eos_token_id") for config in configs), tokenizer.eos_token_id]
    # chat models may name what ends a turn only there; not every model has one
    with contextlib.suppress(OSError, ValueError):
        generation = GenerationConfig.from_pretrained(
            model.source, revision=model.revision or "main"
        )
        named.append(generation.eos_token_id)
    tokens = [token for each in named for token in (each if isinstance(each, list) else [each])]
    return frozenset(token for token in tokens if token is not None)
