"""The one look that all tables share: plain columns, as wide as the terminal within limits."""

import shutil
import textwrap
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table

WIDTH = 80
"""Columns of a report's prose where no terminal shows it; tables are as wide as they are."""
_NO_WIDTH = 10_000
"""Columns beyond any table."""
LEAST_WIDTH, MOST_WIDTH = 60, 120
"""Columns of a report on a terminal: fewer break the figures, in more the eye loses its line."""


def report_width(file: IO[str]) -> int:
    """Return the columns of a report that is printed to ``file``."""
    if not file.isatty():
        return WIDTH
    columns = shutil.get_terminal_size((WIDTH, 0)).columns
    return min(max(columns, LEAST_WIDTH), MOST_WIDTH)


@dataclass(frozen=True)
class Paragraph:
    """A text whose lines break between words alone: a longer word has a line of its own."""

    text: str
    mark: str = ""
    """The beginning of the first line, beyond which all lines begin."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines, each of the console's width at most where its words allow it."""
        lines = textwrap.wrap(
            self.text,
            options.max_width,
            initial_indent=self.mark,
            subsequent_indent=" " * len(self.mark),
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield Segment("\n".join(lines) + "\n")


class NarrowingTable(Table):
    """A table that moves together and breaks its headings, never figures, on narrow terminals."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; in a file or a pipe, whose lines have no end, as wide as it is."""
        if not console.is_terminal:
            whole = self.__rich_measure__(console, options.update(max_width=_NO_WIDTH)).maximum
            options = options.update(max_width=max(options.max_width, whole))
        is_narrow = options.max_width < WIDTH
        if is_narrow and self.__rich_measure__(console, options).maximum > options.max_width:
            self.collapse_padding = True
            for column in self.columns:
                if column.no_wrap:
                    words = f"{column.header}".split()
                    longest = max(map(cell_len, [*words, *map(str, column.cells)]))
                    column.header = textwrap.fill(f"{column.header}", longest)
        yield from super().__rich_console__(console, options)


def make_grid(num_columns: int) -> NarrowingTable:
    """Start a table without headings, of columns of text."""
    table = NarrowingTable(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, collapse_padding=True
    )
    for _ in range(num_columns):
        table.add_column()
    return table


def make_table(title: str, first: str, *numbers: str) -> NarrowingTable:
    """Start a table: a column of names on the left, figures to the right of it."""
    table = NarrowingTable(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(first, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
