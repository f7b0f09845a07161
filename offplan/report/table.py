"""The one look that all tables share: plain columns, 80 characters wide."""

from rich import box
from rich.table import Table

WIDTH = 80
"""Columns of every report, so that what is pasted into an issue reads the same everywhere."""


def make_table(title: str, first: str, *numbers: str) -> Table:
    """Start a table: a column of names on the left, figures to the right of it."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(first, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
