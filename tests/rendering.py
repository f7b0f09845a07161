"""What reports look like in a terminal of their width."""

import io

from rich.console import RenderableType

from offplan.cli.output import print_report


def show(*parts: RenderableType) -> str:
    """Render parts of a report as plain text."""
    file = io.StringIO()
    print_report(*parts, file=file)
    return strip_lines(file.getvalue())


def strip_lines(text: str) -> str:
    """Drop the blanks that pad a table's lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
