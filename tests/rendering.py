"""What reports look like in a terminal of their width."""

from rich.console import Console, RenderableType

from offplan.report.table import WIDTH


def show(part: RenderableType) -> str:
    """Render a part of a report as plain text."""
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(part)
    return strip_lines(captured.get())


def strip_lines(text: str) -> str:
    """Drop the blanks that pad a table's lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
