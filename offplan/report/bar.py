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
    """Columns of a whole bar, at most."""
    beside: int = 0
    """Columns of its line that others need: a bar gives way to figures."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; the colour carries nothing that the length does not."""
        width = min(self.width, options.max_width)
        if options.ascii_only:
            text = "#" * round(self.share * width)
        else:
            whole, part = divmod(round(self.share * width * 8), 8)
            text = "█" * whole + (_EIGHTHS[part] if part else "")
        yield Segment(text, _STYLE)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Ask for the whole width, whatever the share: all bars of a table begin at one column."""
        width = max(1, min(self.width, options.max_width - self.beside))
        return Measurement(width, width)
