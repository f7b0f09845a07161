"""A line that says how fast tokens come while they do."""

import sys
import time
from collections.abc import Callable

from offplan.cli.output import QUIET
from offplan.units import format_rate

_EVERY_S = 0.25


class LiveLine:
    """Tokens a second and use of the link, on stderr: silent unless that is a terminal."""

    def __init__(
        self, num_texts: int, link_bytes: Callable[[], int], *, shown: bool = True
    ) -> None:
        """Count from here on; ``link_bytes`` says what has crossed the link so far."""
        self._shown = shown and sys.stderr.isatty() and not QUIET.get()
        self._num_texts, self._link_bytes = num_texts, link_bytes
        self._num_ended = self._num_tokens = 0
        self._last = time.perf_counter(), 0, link_bytes()

    def count(self, num_tokens: int, *, num_ended: int = 0) -> None:
        """Count tokens that have come, and texts that ended; now and then show both."""
        self._num_tokens += num_tokens
        self._num_ended += num_ended
        then, tokens, moved = self._last
        now = time.perf_counter()
        if not self._shown or now - then < _EVERY_S:
            return
        self._last = now, self._num_tokens, self._link_bytes()
        rate = (self._num_tokens - tokens) / (now - then)
        link = format_rate((self._last[2] - moved) / (now - then))
        text = (
            f"{self._num_ended:,} of {self._num_texts:,} texts, {self._num_tokens:,} tokens, "
            f"{rate:,.1f} a second; {link} over the link"
        )
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *error: object) -> None:
        # for what comes next
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
