"""The console that reports are printed to."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from offplan.cli.printable import printable


class PlainConsole(Console):
    """Prints what names say as it stands: ``[/x]`` is no markup, and no terminal obeys an escape.

    Names of models, tensors and machines come from strangers.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render a part of a report, as rich does, with ``printable`` text alone."""
        for segment in super().render(renderable, options):
            yield segment._replace(
                text=segment.text if segment.control else printable(segment.text)
            )
