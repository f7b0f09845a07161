"""A bar drawn in text, as long as a share."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

_STYLE = Style(color="cyan")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class ShareBar:
    """A horizontal bar: block characters to an eighth of a column, ``#`` on ASCII terminals."""

    share: float
    """Part of the width that is drawn, from 0 to 1."""
    width: int
    """Columns of a whole bar."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; the colour carries nothing that the length does not."""
        if options.ascii_only:
            text = "#" * round(self.share * self.width)
        else:
            whole, part = divmod(round(self.share * self.width * 8), 8)
            text = "█" * whole + (_EIGHTHS[part] if part else "")
        yield Segment(text, _STYLE)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Ask for the whole width, whatever the share: all bars of a table begin at one column."""
        return Measurement(self.width, self.width)
