"""The next token of each sequence, chosen from logits without a wait for the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offplan.errors import InputError

Choose = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""A call makes tokens, int64 of [batch, 1], of logits, [batch, vocabulary], on their device.

It is also given the rows whose token is wanted; what it makes of the others is not used.
"""


def choose_likeliest(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Choose greedily."""
    return logits.argmax(-1, keepdim=True)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, under transformers' names; temperature 0 is greedy."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Number of likeliest tokens that are drawn from; None for all."""
    top_p: float | None = None
    """Probability that the likeliest tokens have together which are drawn from; None for all."""
    seed: int = 0
    """Text 0 is drawn with it, text 1 with the next number, and so on."""

    def __post_init__(self) -> None:
        """Raise InputError for a value that cannot be drawn with."""
        for name, is_right, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a number, 0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and up to 1"),
            ("seed", 0 <= self.seed < 2**62, "0 or more and below 2**62"),
        ):
            if not is_right:
                raise InputError(f"{name} is {getattr(self, name)}; expected {expected}")


class Sampler:
    """Draws tokens; each text has random numbers of its own, whatever it is generated beside."""

    def __init__(self, sampling: Sampling, texts: Sequence[int], device: torch.device) -> None:
        """Draw for the sequences of a batch, of which ``texts`` has the numbers."""
        self._generators = [
            torch.Generator(device).manual_seed(sampling.seed + number) for number in texts
        ]
        self._warp = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        if sampling.top_k is not None:
            self._warp.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            self._warp.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Draw a token for each of ``rows``, as ``Choose`` says.

        One row at a time: sorting the logits of a whole batch would take memory that no plan has
        counted. ``torch.multinomial`` draws alike, and waits for the device to check its input.
        Source: gpt-fast, ``multinomial_sample_one_no_sync``.
        """
        tokens = choose_likeliest(logits, rows)
        for row in rows:
            scores = self._warp(None, logits[row : row + 1].float())
            probabilities = scores.softmax(-1)
            noise = torch.empty_like(probabilities)
            noise.exponential_(generator=self._generators[row])
            tokens[row] = (probabilities / noise).argmax(-1)
        return tokens


def make_chooser(sampling: Sampling | None, texts: Sequence[int], device: torch.device) -> Choose:
    """Return what chooses the tokens of a batch's texts: greedily without ``sampling``."""
    if sampling is None or not sampling.temperature:
        return choose_likeliest
    return Sampler(sampling, texts, device)
