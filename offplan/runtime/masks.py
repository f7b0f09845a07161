"""Masks of texts that follow a grammar: the host makes each while the device makes a step."""

from collections.abc import Sequence
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

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that have to follow; none where there is a choice."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Go on by the first tokens that the grammar allows, and return how many these are."""

    def rollback(self, num_tokens: int) -> bool:
        """Go back by so many tokens; False if the grammar does not let it."""

    def deep_copy(self) -> "Matcher":
        """Return another at the same place; it takes longer the longer the text is."""


class RowMask(LogitsProcessor):
    """Leaves a row the tokens that its grammar allows.

    Runs on the stream of its calls. The host waits for nothing: ``follow`` needs tokens that have
    arrived, and what it writes was copied to the device before these tokens were chosen.

    Drafts never reach the text's matcher. A second one goes ahead by them and back: what it meets
    there may end it for good.
    """

    def __init__(
        self, matcher: Matcher, device: torch.device, prompt_tokens: int, most_drafts: int = 0
    ) -> None:
        """Make the mask of the first token behind a prompt, on the current stream of ``device``.

        A pass checks up to ``most_drafts`` drafts.
        """
        self._matcher, self._begin = matcher, prompt_tokens
        self._scout: Matcher | None = None
        """The matcher that tries drafts, behind the same tokens; None if it is to be copied."""
        self.num_followed = 0
        """Tokens of the text that the mask is behind."""
        self.error: InputError | None = None
        """Reason that the grammar cannot go on; None while it can."""
        self._masked = range(0)
        """Tokens of the text that each mask on the device is behind; none while they change."""
        first = self._compute()
        size = 1 + most_drafts, len(first)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bits = torch.empty(size, dtype=torch.uint8, device=device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._copy([first], 0)
        self.can_go_back = most_drafts > 0 and self._try_going_back(first)
        """True if drafts can be tried. Source: llguidance 1.9, whose matchers do not go back where
        a grammar has ``stop`` or ``max_tokens``."""

    @property
    def is_over(self) -> bool:
        """True if the text is whole: nothing may follow it."""
        return self.error is None and self._matcher.is_stopped()

    def follow(self, number: int, token: int) -> None:
        """Go on by the text's token of a number, from 0 on; nothing if that has been done."""
        if number < self.num_followed or self.error is not None:
            return
        scout, self._scout = self._scout, None
        is_right, self.num_followed = self._matcher.consume_token(token), number + 1
        if not is_right:
            self._fail()
        elif scout is not None and scout.consume_token(token):
            self._scout = scout

    def refresh(self, num_chosen: int) -> None:
        """Make the mask behind so many tokens, and send it to the device on the current stream.

        Behind an end token, or where nothing may follow, any mask will do: nobody uses the token.
        """
        if self._masked and self._masked.start == num_chosen:
            return
        is_used = num_chosen == self.num_followed and not self._matcher.is_stopped()
        self._copy([self._compute()] if is_used else [], num_chosen)

    def count_forced(self, num_chosen: int) -> int:
        """Count the tokens that have to follow so many, some of which may not have arrived."""
        return len(self.list_forced()) - (num_chosen - self.num_followed)

    def list_forced(self) -> list[int]:
        """Return the tokens that have to follow; none where there is a choice."""
        return [] if self.error is not None else self._matcher.compute_ff_tokens()

    def cut(self, drafts: Sequence[int]) -> list[int]:
        """Return the first drafts that may follow, without one that ends the text."""
        scout = self._take_scout()
        number = scout.try_consume_tokens([*drafts])
        is_end = scout.is_stopped()
        self._bring_back(scout, number)
        return [*drafts[: max(0, number - is_end)]]

    def prepare(self, drafts: Sequence[int]) -> int:
        """Make the masks of a pass, and send them to the device on the current stream.

        The first one is of the next token, each further one of the token behind a draft more.
        ``cut`` has returned the drafts. Returns the number of masks: the matcher's limits may leave
        fewer than one for each place. The text goes on from there without drafts.
        """
        masks, scout = [self._compute()], self._take_scout()
        for draft in drafts:
            is_right = scout.consume_token(draft)
            mask = scout.compute_bitmask()
            if not is_right or scout.is_stopped():
                break
            masks.append(mask)
        else:
            self._bring_back(scout, len(drafts))
        self._copy(masks, self.num_followed)
        return len(masks)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, float32 of [1, vocabulary], minus infinity for what is not allowed.

        ``input_ids`` is the prompt and the text so far, whose length says which mask is the one.
        """
        bits = self._bits[self._masked.index(input_ids.shape[1] - self._begin)]
        allowed = (bits[:, None] >> self._shifts & 1).flatten().bool()
        num_tokens = scores.shape[-1]
        if len(allowed) < num_tokens:  # the vocabulary is padded beyond all tokens
            allowed = torch.nn.functional.pad(allowed, (0, num_tokens - len(allowed)))
        return scores.clamp_min(_LEAST).masked_fill(~allowed[:num_tokens], -torch.inf)

    def _compute(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        return mask

    def _copy(self, masks: Sequence[bytes], num_masked: int) -> None:
        self._masked = range(0)
        for place, mask in enumerate(masks):
            self._host[place] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        number = len(masks)
        self._bits[:number].copy_(self._host[:number], non_blocking=True)
        self._masked = range(num_masked, num_masked + max(1, number))

    def _try_going_back(self, mask: bytes) -> bool:
        """Go ahead by the first token that is allowed, and back."""
        bits, scout = int.from_bytes(mask, "little"), self._take_scout()
        if bits and scout.consume_token((bits & -bits).bit_length() - 1):
            self._bring_back(scout, 1)
        return self._scout is not None

    def _take_scout(self) -> Matcher:
        """Return the matcher that tries drafts; a call that is aborted does not give it back."""
        scout, self._scout = self._scout, None
        return self._matcher.deep_copy() if scout is None else scout

    def _bring_back(self, scout: Matcher, num_tokens: int) -> None:
        if not scout.is_error() and scout.rollback(num_tokens):
            self._scout = scout

    def _fail(self) -> None:
        self.error = InputError("the text cannot follow its grammar any further: simplify it")
