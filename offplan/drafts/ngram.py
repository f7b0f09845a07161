"""Drafts from the text itself: what followed the same words earlier.

Source: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with Reference" (2023).
"""

from collections.abc import Sequence

LEAST_MATCH = 2
"""Tokens at the text's end that have to stand earlier in the text. Source: estimated."""
MOST_MATCH = 16
"""Tokens of a match that are counted: a longer one is no better. Source: estimated."""
MOST_PLACES = 32
"""Places of the same LEAST_MATCH tokens that are compared, the last ones. Source: estimated."""


class NgramDrafter:
    """Proposes what followed the longest suffix of the text that stands in it earlier."""

    def __init__(self) -> None:
        """Begin with an empty text."""
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Ends of each LEAST_MATCH tokens of the text, ascending, but of the text's last ones."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text behind those taken before."""
        for token in tokens:
            if len(self._tokens) >= LEAST_MATCH:
                self._places.setdefault(self._suffix, []).append(len(self._tokens))
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens behind the longest match, of equals the last one."""
        if len(self._tokens) < LEAST_MATCH:
            return []
        places = self._places.get(self._suffix, [])[-MOST_PLACES:]
        if not places:
            return []
        place = max(places, key=lambda place: (self._count_match(place), place))
        return self._tokens[place : place + most]

    @property
    def _suffix(self) -> tuple[int, ...]:
        return tuple(self._tokens[-LEAST_MATCH:])

    def _count_match(self, place: int) -> int:
        """Count the tokens before ``place`` that are those at the text's end."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(MOST_MATCH, place)
        return next(
            (n for n in range(LEAST_MATCH, most) if tokens[place - n - 1] != tokens[end - n - 1]),
            most,
        )
