"""The next token of each sequence, chosen from logits without a wait for the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from offplan.errors import InputError

_LEAST_TEMPERATURE = 1e-30
"""Dividing by less takes logits beyond float32, and what is drawn of infinities is no text."""
MAX_SEED = 2**62
"""Seeds are below it."""

Choose = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""A call makes tokens, int64 of [batch, 1], of logits, [batch, vocabulary], on their device.

It is also given the rows whose token is wanted; what it makes of the others is not used.
"""


def check_tokens(tokens: object, logits: torch.Tensor) -> None:
    """Raise InputError for what a ``Choose`` returned that is not as ``Choose`` says."""
    batch, device = len(logits), logits.device
    found = f"a {type(tokens).__name__}"
    if isinstance(tokens, torch.Tensor):
        if (tokens.dtype, tokens.shape, tokens.device) == (torch.int64, (batch, 1), device):
            return
        dtype = str(tokens.dtype).removeprefix("torch.")
        found = f"{dtype} of shape {list(tokens.shape)} on {tokens.device}"
    raise InputError(
        f"choose returned {found}, expected int64 of shape [{batch}, 1] on {device}: a token for "
        "each row of the logits, as logits.argmax(-1, keepdim=True) gives"
    )


def choose_likeliest(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Choose greedily."""
    return logits.argmax(-1, keepdim=True)


NO_TOKEN = -1
"""Stands on the host where a token was chosen of logits that hold a NaN."""


def mark_nan(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return ``tokens``, int64 of [batch, 1], as [batch], NO_TOKEN where the logits hold a NaN.

    A maximum is NaN if any logit is; it takes no memory, and the host waits for nothing.
    """
    return torch.where(logits.amax(-1).isnan(), NO_TOKEN, tokens[:, 0])


@dataclass(frozen=True)
class Sampling:
    """The way in which tokens are drawn, under transformers' names; temperature 0 is greedy."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Number of likeliest tokens that are drawn from; None for all."""
    top_p: float | None = None
    """Probability that the likeliest tokens have together which are drawn from; None for all."""
    seed: int = 0
    """Text 0 is drawn with it, text 1 with the next number, and so on."""
    min_p: float | None = None
    """Part of the likeliest token's probability that others need to be drawn; None for all."""
    typical_p: float | None = None
    """Probability that the most typical tokens have together which are drawn from."""

    def __post_init__(self) -> None:
        """Raise InputError for a value that cannot be drawn with."""
        for name, is_right, expected in (
            (
                "temperature",
                self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf,
                f"0, which is greedy, or a number from {_LEAST_TEMPERATURE} on",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and up to 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "typical_p",
                self.typical_p is None or 0 < self.typical_p <= 1,
                "above 0 and up to 1",
            ),
            ("seed", 0 <= self.seed < MAX_SEED, "0 or more and below 2**62"),
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
        if sampling.top_p is not None and sampling.top_p < 1:
            self._warp.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._warp.append(MinPLogitsWarper(sampling.min_p))
        if sampling.typical_p is not None and sampling.typical_p < 1:
            self._warp.append(TypicalLogitsWarper(sampling.typical_p))

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Draw a token for each of ``rows``, as ``Choose`` says.

        One row at a time: sorting the logits of a whole batch would take memory that no plan has
        counted. ``torch.multinomial`` draws alike, and waits for the device to check its input.
        Source: gpt-fast, ``multinomial_sample_one_no_sync``.
        """
        tokens = choose_likeliest(logits, rows)
        for row in rows:
            tokens[row] = self.draw(logits[row : row + 1].float(), row)
        return tokens

    def save(self) -> list[torch.Tensor]:
        """Return what the next draws depend on, for ``restore``."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, state: list[torch.Tensor]) -> None:
        """Draw as if nothing had been drawn since ``save``."""
        for generator, saved in zip(self._generators, state, strict=True):
            generator.set_state(saved)

    def draw(self, scores: torch.Tensor, row: int) -> torch.Tensor:
        """Draw a row's token, int64 of [1], of its logits, float32 of [1, vocabulary]."""
        probabilities = self._warp(None, scores).softmax(-1)
        noise = torch.empty_like(probabilities)
        noise.exponential_(generator=self._generators[row])
        return (probabilities / noise).argmax(-1)


class Ruled:
    """Chooses one text's tokens of what logits processors make of the logits."""

    def __init__(
        self,
        processors: LogitsProcessorList,
        prompt: Sequence[int],
        num_tokens: int,
        sampler: Sampler | None,
        device: torch.device,
    ) -> None:
        """Continue ``prompt`` by up to ``num_tokens``, greedily without a ``sampler``.

        Runs on the current stream, which is to be that of the calls: they write to what it makes.
        """
        self._sampler, self._processors = sampler, processors
        self._length = len(prompt)
        self._tokens = torch.tensor([[*prompt, *[0] * num_tokens]]).to(device)

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Choose the token, as ``Choose`` says, of logits of one row."""
        scores = self._processors(self._tokens[:, : self._length], logits.float())
        token = self._sampler.draw(scores, 0) if self._sampler else scores.argmax(-1)
        self._tokens[0, self._length] = token[0]
        self._length += 1
        return token[:, None]

    def save(self) -> tuple[int, list[torch.Tensor]]:
        """Return what the next choice depends on, for ``restore``."""
        return self._length, self._sampler.save() if self._sampler else []

    def restore(self, state: tuple[int, list[torch.Tensor]]) -> None:
        """Choose as if nothing had been chosen since ``save``."""
        self._length, drawn = state
        if self._sampler:
            self._sampler.restore(drawn)


class Checking:
    """Chooses a token behind each token of a pass that checks drafts.

    A draft is right if the token chosen in its place is the same. As drafts are no random choice,
    that is rejection sampling: a draft x is taken with probability p(x), and what comes in its
    place is drawn from p without x. A chooser goes back to what it was behind the last token taken,
    so that a text is as it would be without drafts.
    Source: Leviathan et al. (2023), Algorithm 1, for drafts of probability 1.
    """

    def __init__(self, choose: Choose) -> None:
        """Choose by a text's chooser, and keep what it goes back to."""
        self._chooser = cast(Any, choose)
        self._states = [] if choose is choose_likeliest else [self._chooser.save()]
        """States of the chooser before the first token, and behind each."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token for each of the logits, [tokens, vocabulary], in order.

        Returns int64 of [tokens, 1]; each supposes that the drafts before it are right.
        """
        if not self._states:
            return choose_likeliest(logits, ())
        tokens = []
        for of_token in logits.split(1):
            tokens.append(self._chooser(of_token, (0,)))
            check_tokens(tokens[-1], of_token)
            self._states.append(self._chooser.save())
        return torch.cat(tokens)

    def keep(self, num_made: int) -> None:
        """Have the chooser go on behind the first ``num_made`` tokens."""
        if self._states:
            self._chooser.restore(self._states[num_made])


def make_chooser(sampling: Sampling | None, texts: Sequence[int], device: torch.device) -> Choose:
    """Return what chooses the tokens of a batch's texts: greedily without ``sampling``."""
    sampler = _make_sampler(sampling, texts, device)
    return choose_likeliest if sampler is None else sampler


def make_ruled_chooser(
    processors: LogitsProcessorList,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling | None,
    text: int,
    device: torch.device,
) -> Choose:
    """Return what chooses up to ``num_tokens`` behind a prompt, by ``processors``.

    ``text`` is its number. To be called on the stream that the chooser runs on.
    """
    if not processors:
        return make_chooser(sampling, [text], device)
    sampler = _make_sampler(sampling, [text], device)
    return Ruled(processors, prompt, num_tokens, sampler, device)


def _make_sampler(
    sampling: Sampling | None, texts: Sequence[int], device: torch.device
) -> Sampler | None:
    if sampling is None or not sampling.temperature:
        return None
    return Sampler(sampling, texts, device)
