"""Where texts go while they are made: to the terminal, or to a file of results."""

import sys
from collections.abc import Mapping, Sequence

from offplan.cli.lines import Line, Results
from offplan.cli.printable import printable
from offplan.report.payload import text_payload
from offplan.runtime.texts import Text


class Teller:
    """Takes what texts are made of; this one keeps it to itself, for a result that is printed."""

    is_shown = False
    """Whether a text is seen while it is made."""

    def take(self, text: Text, piece: str) -> None:
        """Take what a token has added to a text."""

    def finish(self) -> None:
        """Know that there is no more."""


class Printer(Teller):
    """Prints texts behind their prompts: while they are made if one is made at a time.

    They are a model's, and no terminal is to obey them.
    """

    def __init__(self, prompts: Sequence[str], *, alone: bool) -> None:
        """Print behind these prompts, by the texts' numbers; ``alone``: one is made at a time."""
        self._prompts = prompts
        self._alone = alone
        self._texts: dict[int, Text] = {}
        self.is_shown = alone and sys.stdout.isatty()

    def take(self, text: Text, piece: str) -> None:
        """Print what a token has added, if this is the one text that is being made."""
        is_new = text.number not in self._texts
        self._texts[text.number] = text
        if self._alone:
            print((self._begin(text) if is_new else "") + printable(piece), end="", flush=True)

    def finish(self) -> None:
        """Print what has not been printed yet, in the order of the prompts, and end the line."""
        if not self._alone:
            for number in sorted(self._texts):
                text = self._texts[number]
                print(self._begin(text) + printable(text.made), end="")
        print("\n", flush=True)

    def _begin(self, text: Text) -> str:
        between = "\n\n" if text.number else ""
        return between + printable(self._prompts[text.number])


class Writer(Teller):
    """Writes a line of results for each text that ends."""

    def __init__(self, results: Results, lines: Mapping[int, Line]) -> None:
        """Write to ``results``; ``lines`` are those of the prompts, by the texts' numbers."""
        self._results, self._lines = results, lines

    def take(self, text: Text, piece: str) -> None:
        """Write a text's line, once it has ended."""
        if text.finish is not None:
            self._results.write(self._lines[text.number], text_payload(text))
