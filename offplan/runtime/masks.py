"""Masks of texts that follow a grammar: the host makes each while the device makes a step."""

from typing import Protocol

import torch
from transformers import LogitsProcessor

from offplan.errors import InputError

_LEAST = -1e4
"""Least logit of a token that the grammar allows: above minus infinity, which others have. Other
rules may have banned the only tokens that are allowed."""


class Matcher(Protocol):
    """A grammar and the place in it that a text has reached. Source: llguidance, ``LLMatcher``."""

    def consume_token(self, sampled_token: int) -> bool:
        """Go on by a token; False puts the matcher into an error state for good."""

    def compute_bitmask(self) -> bytes:
        """Return a bit for each token, set for what may follow; tokens of one byte begin low."""

    def is_stopped(self) -> bool:
        """Return True if nothing may follow but an end token, and in an error state."""

    def is_error(self) -> bool:
        """Return True if the grammar was left, or went beyond the matcher's limits."""


class RowMask(LogitsProcessor):
    """Leaves a row the tokens that its grammar allows.

    Runs on the stream of its calls. The host waits for nothing: ``follow`` needs tokens that have
    arrived, and what it writes was copied to the device before these tokens were chosen.
    """

    def __init__(self, matcher: Matcher, device: torch.device) -> None:
        """Make the mask of the first token, on the current stream of ``device``."""
        self._matcher = matcher
        self.num_followed = 0
        """Tokens of the text that the mask is behind."""
        self.error: InputError | None = None
        """Reason that the grammar cannot go on; None while it can."""
        self._num_masked = 0
        """Tokens that the mask on the device is behind."""
        first = self._compute()
        self._host = torch.empty(len(first), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bits = torch.empty(len(first), dtype=torch.uint8, device=device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._copy(first)

    @property
    def is_over(self) -> bool:
        """True if the text is whole: nothing may follow it."""
        return self.error is None and self._matcher.is_stopped()

    def follow(self, number: int, token: int) -> None:
        """Go on by the text's token of a number, from 0 on; nothing if that has been done."""
        if number < self.num_followed or self.error is not None:
            return
        self.num_followed = number + 1
        if not self._matcher.consume_token(token):
            self._fail()

    def refresh(self) -> None:
        """Make the mask of the next token, and send it to the device on the current stream."""
        if self._num_masked < self.num_followed and not self._matcher.is_stopped():
            self._num_masked = self.num_followed
            self._copy(self._compute())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float32 of [1, vocabulary], minus infinity for what is not allowed."""
        allowed = (self._bits[:, None] >> self._shifts & 1).flatten().bool()
        num_tokens = scores.shape[-1]
        if len(allowed) < num_tokens:  # the vocabulary is padded beyond all tokens
            allowed = torch.nn.functional.pad(allowed, (0, num_tokens - len(allowed)))
        return scores.clamp_min(_LEAST).masked_fill(~allowed[:num_tokens], -torch.inf)

    def _compute(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        return mask

    def _copy(self, mask: bytes) -> None:
        self._host.copy_(torch.frombuffer(bytearray(mask), dtype=torch.uint8))
        self._bits.copy_(self._host, non_blocking=True)

    def _fail(self) -> None:
        self.error = InputError("the text cannot follow its grammar any further: simplify it")
