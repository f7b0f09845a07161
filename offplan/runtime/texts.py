"""Texts that continue prompts, together: decoded as their tokens come, ended where they end."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import torch

from offplan.errors import NotANumberError
from offplan.runtime.generate import Arrival, Measured
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import (
    NO_TOKEN,
    Choose,
    Sampling,
    check_tokens,
    choose_likeliest,
    make_ruled_chooser,
    mark_nan,
)

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that the first one is decoded behind: some tokenizers drop a space else."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character that is not whole are decoded to."""
_MOST_PART = 3
"""Bytes that a character of UTF-8 may have without being whole, and so of ``_PART``."""
_MOST_HELD = 32
"""Tokens without a whole character at their end behind which only ``_MOST_PART`` can change."""


class Text:
    """A prompt, and what follows it."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        num_tokens: int,
        rules: TokenRules | None = None,
        stop_strings: Sequence[str] = (),
        number: int = 0,
    ) -> None:
        """Continue the tokens ``prompt`` by up to ``num_tokens``, decoded by ``tokenizer``.

        What ends texts by the model's ``rules`` ends this one, and so does one of ``stop_strings``;
        a string is left out. ``number`` is the text's own among all, by which its random numbers
        are seeded.
        """
        self.prompt = list(prompt)
        self.number = number
        self.made = ""
        """The text so far, without special tokens, and without what may begin a stop string."""
        self.num_made = 0
        """Tokens so far, the one that ended the text included."""
        self.finish: Literal["stop", "length"] | None = None
        """Why it ended: a token or a string that ends texts, or its length; None while it goes on.
        """
        self._tokenizer = tokenizer
        self.num_tokens, self.rules = num_tokens, rules or TokenRules()
        self._stop_strings = [each for each in stop_strings if each] + [*self.rules.stop_strings]
        self._known, self._fresh = self._find_context(), list[int]()
        self._num_shown = len(self._decode_tokens(self._known))
        self._held = ""

    def add(self, token: int) -> str:
        """Take the next token; return the text that is certain by now."""
        self.num_made += 1
        if token in self.rules.end_tokens:
            self.finish = "stop"
        elif self.num_made == self.num_tokens:
            self.finish = "length"
        text = self._held + self._decode(token)
        found = [at for at in map(text.find, self._stop_strings) if at >= 0]
        if found:
            self.finish = "stop"
        end = min(found, default=len(text) if self.finish else len(text) - self._count_held(text))
        self._held = text[end:]
        self.made += text[:end]
        return text[:end]

    def _decode(self, token: int) -> str:
        """Return what a token adds to the text, without a character that is not whole.

        Source: the two windows by which vLLM and TGI decode incrementally. A token may end in a
        part of a character for long: what stands before the part is certain all the same.
        """
        self._fresh.append(token)
        text = self._decode_tokens(self._known + self._fresh)
        num_held = 0 if self.finish else len(text) - len(text.rstrip(_PART))
        if len(self._fresh) >= _MOST_HELD:
            num_held = min(num_held, _MOST_PART)
        new = text[self._num_shown : len(text) - num_held]
        self._num_shown += len(new)
        if (new and not num_held) or len(self._fresh) >= 2 * _MOST_HELD:
            last, self._fresh = self._fresh[-_MOST_HELD:], []
            # a space that begins a text may be nothing, and special tokens alone are no context
            if self._decode_tokens(last):
                self._known = last
            elif new:
                self._known = (self._known + last)[-_MOST_HELD:]
            self._num_shown = max(0, len(self._decode_tokens(self._known)) - num_held)
        return new

    def _find_context(self) -> list[int]:
        """Return the end of the prompt behind which tokens are decoded as behind all of it.

        A window that begins within a character of bytes would make the next ones unreadable, too,
        and one of special tokens alone is no context.
        """
        num_tokens = _CONTEXT_TOKENS
        while num_tokens < len(self.prompt):
            text = self._decode_tokens(self.prompt[-num_tokens:])
            if text and _PART not in text:
                break
            num_tokens *= 2
        return self.prompt[-num_tokens:]

    def _decode_tokens(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _count_held(self, text: str) -> int:
        """Count the characters at the end of ``text`` that may begin a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        return next(
            (
                count
                for count in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-count:]) for stop in self._stop_strings)
            ),
            0,
        )


def generate_texts(
    rows: Rows,
    texts: Iterable[Text],
    sampling: Sampling | None = None,
    measured: Measured | None = None,
) -> Iterator[tuple[Text, str]]:
    """Continue texts, as many at a time as there are ``rows``; yield one with what a token adds.

    A text begins in the row that another has left, while those beside it go on. ``measured`` is
    filled: the prompt's figures are of the texts that begin together at first, the steps those of
    all. Raises what ``Rows.join_all`` and ``Rows.extend`` raise, and NotANumberError where a text's
    logits are NaN: no text begins from there on, and those beside it are made first.
    """
    together = _Together(rows, sampling, Measured() if measured is None else measured)
    return together.run(deque(texts))


@dataclass
class _Going:
    """A text that is being made."""

    text: Text
    choose: Choose
    num_chosen: int = 0
    """Tokens that the device has chosen; the host may not have them yet."""
    made: list[int] = field(default_factory=list)
    """Tokens that the host has."""
    is_nan: bool = False
    """Whether its last logits were NaN, so that there is no more of it."""


class _Together:
    """Texts in the rows of a cache. The next step is queued before the host waits for a token."""

    def __init__(self, rows: Rows, sampling: Sampling | None, measured: Measured) -> None:
        self._rows, self._sampling, self._measured = rows, sampling, measured
        self._session = rows.session
        self._going: dict[int, _Going] = {}
        """The texts in use of a row, by the row."""
        self._arrivals: deque[tuple[dict[int, _Going], Arrival, float | None]] = deque()
        """Tokens on their way, whose they are, and when their prompts were begun, of prompts."""
        self._failed: list[_Going] = []
        self._last = 0.0
        """When the last tokens arrived."""
        on_gpu = self._session.device.type == "cuda"
        # page-locked once: a later allocation would wait for the device
        host = torch.empty(4, rows.num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._hosts = cycle(host.unbind())
        with self._session.stream():
            self._tokens = torch.zeros_like(host[0, :, None], device=self._session.device)
        """The last token of each row, int64 of [rows, 1]."""

    def run(self, waiting: deque[Text]) -> Iterator[tuple[Text, str]]:
        """Make all texts that are waiting, and raise NotANumberError for those that failed."""
        while waiting or self._going or self._arrivals:
            num_queued = 1 if self._going else 0
            if self._going:
                self._extend()
            yield from self._take(num_queued)
            if self._failed:
                waiting.clear()
            if waiting and self._rows.num_free:
                yield from self._take(0)  # or a prompt would count as a step's time
                count = min(len(waiting), self._rows.num_free)
                self._join([waiting.popleft() for _ in range(count)])
        if self._failed:
            raise self._explain()

    def _join(self, texts: Sequence[Text]) -> None:
        began, moved = time.perf_counter(), self._session.link_bytes
        joined = self._rows.join_all([text.prompt for text in texts])
        beginning = {}
        with self._session.stream():  # never across a yield: the caller has a stream of its own
            for text, (row, _, _) in zip(texts, joined, strict=True):
                beginning[row] = self._going[row] = _Going(text, self._make_chooser(text))
            logits = joined[0].logits.new_empty(self._rows.num_rows, len(joined[0].logits))
            for each in joined:
                logits[each.row] = each.logits
            self._choose(logits, beginning, began)
        if not self._measured.prefill_link_bytes:
            self._measured.prefill_link_bytes = self._session.link_bytes - moved

    def _extend(self) -> None:
        moved = self._session.link_bytes
        logits = self._rows.extend([*self._going], self._tokens)
        with self._session.stream():
            self._choose(logits, dict(self._going), None)
        self._measured.decode_link_bytes += self._session.link_bytes - moved
        self._measured.num_decodes += 1

    def _make_chooser(self, text: Text) -> Choose:
        device = self._session.device
        processors = text.rules.make_processors(len(text.prompt), device)
        return make_ruled_chooser(
            processors, text.prompt, text.num_tokens, self._sampling, text.number, device
        )

    def _choose(self, logits: torch.Tensor, texts: dict[int, _Going], began: float | None) -> None:
        """Choose the next token of ``texts``, by their rows of the logits; inside the stream."""
        tokens = choose_likeliest(logits, ())
        for row, going in texts.items():
            if going.choose is not choose_likeliest:
                own = logits[row : row + 1]
                chosen = going.choose(own, (0,))
                check_tokens(chosen, own)
                tokens[row] = chosen[0]
            going.num_chosen += 1
        arrival = Arrival(mark_nan(tokens, logits), next(self._hosts)[: len(tokens)])
        self._arrivals.append((texts, arrival, began))
        known = self._tokens.clone()  # the rows keep the one before
        for row in texts:
            known[row] = tokens[row]
        self._tokens = known
        for row, going in texts.items():
            if going.num_chosen == going.text.num_tokens:
                self._end(row, going)

    def _take(self, num_left: int) -> Iterator[tuple[Text, str]]:
        """Wait for tokens, those of the last ``num_left`` passes left out; yield what they add."""
        while len(self._arrivals) > num_left:
            texts, arrival, began = self._arrivals.popleft()
            tokens, now = arrival.wait()
            if began is None:
                self._measured.step_s.append(now - self._last)
            elif not self._measured.first_token_s:
                self._measured.first_token_s = now - began
            self._last, made = now, tokens.tolist()
            for row, going in texts.items():
                if going.text.finish is not None or going.is_nan:
                    continue
                if made[row] == NO_TOKEN:
                    going.is_nan = True
                    self._failed.append(going)
                    self._end(row, going)
                    continue
                going.made.append(made[row])
                piece = going.text.add(made[row])
                if going.text.finish is not None:
                    self._end(row, going)
                yield going.text, piece

    def _end(self, row: int, going: _Going) -> None:
        if self._going.get(row) is going:
            del self._going[row]
            self._rows.leave(row)

    def _explain(self) -> NotANumberError:
        first = self._failed[0]
        cause = self._rows.find_nan(first.text.prompt + first.made)
        numbers = [going.text.number for going in self._failed]
        return NotANumberError(cause, numbers, [f"text {number}" for number in numbers])
