"""Where drafts come from, each source behind one protocol."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from offplan.capabilities.drafts import DraftKind
from offplan.drafts.ngram import NgramDrafter


class Drafter(Protocol):
    """Guesses how one text goes on."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text behind those taken before: of its prompt, then those made."""

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow; none if it has no guess."""


class Grammar(Protocol):
    """A grammar that one text follows."""

    def list_forced(self) -> list[int]:
        """Return the tokens that have to follow; none where there is a choice."""

    def cut(self, drafts: Sequence[int]) -> list[int]:
        """Return the first drafts that may follow, without one that ends the text."""


DRAFTERS: Mapping[DraftKind, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""Makers of the drafters that read a text alone, by the kind of a plan's drafts.

Whoever runs the passes makes the others, which read what passes give.
"""
