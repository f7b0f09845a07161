"""Texts that continue prompts: decoded as their tokens come, ended where they end."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from offplan.runtime.rules import TokenRules

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that the first one is decoded behind: some tokenizers drop a space else."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""Text that the bytes of a character that is not whole are decoded to."""
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
        keeps_special: bool = False,
        hidden: Collection[int] = (),
    ) -> None:
        """Continue the tokens ``prompt`` by up to ``num_tokens``, decoded by ``tokenizer``.

        Tokens that end texts by the model's ``rules`` end this one, and so does one of
        ``stop_strings``; a string is left out. ``number`` is the text's own among all, by which its
        random numbers are seeded. ``keeps_special`` leaves special tokens in the text, but the one
        that ends it, and those of ``hidden``.
        """
        self._keeps_special, self._hidden = keeps_special, hidden
        self.prompt = list(prompt)
        self.number = number
        self.made = ""
        """The text so far, without special tokens, and without what may begin a stop string."""
        self.num_made = 0
        """Tokens so far, the one that ended the text included."""
        self.finish: Literal["stop", "length"] | None = None
        """Reason of its end: a token or a string that ends texts, or its length; None while it goes
        on.
        """
        self.ended_by: str | None = None
        """The string that ended it; None if none did."""
        self.tokenizer = tokenizer
        self.num_tokens, self.rules = num_tokens, rules or TokenRules()
        self._stop_strings = [each for each in stop_strings if each] + [*self.rules.stop_strings]
        self._known, self._fresh = self._find_context(), list[int]()
        self._num_shown = len(self._decode_tokens(self._known))
        self._held = ""

    def add(self, token: int, *, is_last: bool = False) -> str:
        """Take the next token; return the text that is certain by now.

        ``is_last`` ends the text with it, as an end token would behind it.
        """
        self.num_made += 1
        if is_last or token in self.rules.end_tokens:
            self.finish = "stop"
        elif self.num_made == self.num_tokens:
            self.finish = "length"
        text = self._held + self._decode(token)
        found = [(at, each) for each in self._stop_strings if (at := text.find(each)) >= 0]
        end = len(text)
        if found:
            self.finish = "stop"
            end, self.ended_by = min(found, key=lambda each: each[0])
        elif self.finish is None:
            end -= self._count_held(text)
        self._held = text[end:]
        self.made += text[:end]
        return text[:end]

    def _decode(self, token: int) -> str:
        """Return what a token adds to the text, without a character that is not whole.

        Source: the two windows by which vLLM and TGI decode incrementally. A token may end in a
        part of a character for long: what stands before the part is certain all the same.
        """
        is_hidden = token in self._hidden or token in self.rules.end_tokens
        if not (self._keeps_special and is_hidden):
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
            self.tokenizer.decode(
                tokens,
                skip_special_tokens=not self._keeps_special,
                clean_up_tokenization_spaces=False,
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
