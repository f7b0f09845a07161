"""What reports look like in a terminal of their width."""

import io

from rich.console import RenderableType

from offplan.cli.output import print_report


class Terminal(io.StringIO):
    """A file that is a terminal."""

    def isatty(self) -> bool:
        return True


def show(*parts: RenderableType, file: io.StringIO | None = None) -> str:
    """Render parts of a report as plain text, to a file that is no terminal if none is given."""
    file = file or io.StringIO()
    print_report(*parts, file=file)
    return strip_lines(file.getvalue())


def strip_lines(text: str) -> str:
    """Drop the blanks that pad a table's lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
