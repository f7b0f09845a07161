"""A drawing that stretches: lengths across are shares of its width, those down are pixels.

So one drawing suits a telephone and a wide window, and its texts keep their size.
"""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

LINE = 18
"""Pixels from one line of text to the next."""

STYLE = """\
.offplan {
  color-scheme: light dark; font: 13px system-ui, "DejaVu Sans", sans-serif;
  --page: #ffffff; --text: #1f2328; --faint: #59636e; --rest: #e4e8ec; --wait: #f3c6bd;
  --gpu: #0072b2; --copy: #e69f00; --read: #009e73; --both: #999933; --turn: #882255;
  --row: #aa4499; --ring: #a65a00; --cache: #56b4e9; --work: #ddcc77; --over: #b9c3cd;
  --host: #57606a; --compute: #332288; --best: #59636e; --plan: #d55e00;
  --multiply: #cc6677; --late: #d9cdf0;
  --predicted: #b9c3cd; --measured: #332288;
}
@media (prefers-color-scheme: dark) {
  .offplan {
    --page: #0d1117; --text: #e6edf3; --faint: #9198a1; --rest: #2a313a; --wait: #6d332b;
    --gpu: #3a8fd0; --copy: #e69f00; --read: #1fb589; --both: #b3b34d; --turn: #c2557f;
    --row: #c76bbb; --ring: #b56a12; --cache: #8fd0f5; --work: #ddcc77; --over: #475260;
    --host: #8b949e; --compute: #8a7ff0; --best: #9198a1; --plan: #ff7b3d;
    --multiply: #d97a8a; --late: #463d6b;
    --predicted: #6a7683; --measured: #8a7ff0;
  }
}
.offplan svg { overflow: visible; }
.offplan text { fill: var(--text); }
.offplan text.strong { font-weight: 600; font-size: 14px; }
.offplan text.faint { fill: var(--faint); font-size: 12px; }
.offplan text.large { font-weight: 600; font-size: 22px; }
"""
"""The look of all pictures, by day and by night. Nothing in it is to be fetched.

A colour has one meaning in all pictures, and none is told from another by red and green alone.
Source: the palettes of Okabe and Ito, and of Tol (muted)."""


def element(tag: str, *children: "Element | str", **attributes: str) -> Element:
    """Return an element of a page or a picture; texts are escaped when it is written."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): v for name, v in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


class Canvas:
    """Collects what is drawn, from the top down; ``height`` are the pixels so far."""

    def __init__(self) -> None:
        self.height = 0
        self._drawn: list[Element] = []

    def bar(self, parts: Sequence[tuple[str, float, float, str]], height: int = LINE) -> None:
        """Draw a bar of parts: colour, the shares of the width where it begins and ends, a hint."""
        self.box("rest", 0, 1, self.height, height)
        for colour, start, stop, hint in parts:
            self.box(colour, start, stop, self.height, height, hint)
        self.height += height + 4

    def box(
        self, colour: str, start: float, stop: float, top: float, height: float, hint: str = ""
    ) -> None:
        """Fill a box between two shares of the width; ``hint`` shows on hovering."""
        x, width = _percent(start), _percent(stop - start)
        self._add("rect", f"fill: {_paint(colour)}", hint, x=x, width=width, y=top, height=height)

    def dot(self, colour: str, at: float, down: float, radius: float, hint: str) -> None:
        """Draw a dot."""
        self._add("circle", f"fill: {_paint(colour)}", hint, cx=_percent(at), cy=down, r=radius)

    def line(self, colour: str, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Draw a line between two points: a share of the width, pixels down."""
        (x1, y1), (x2, y2) = start, stop
        style = f"stroke: {_paint(colour)}"
        self._add("line", style, x1=_percent(x1), x2=_percent(x2), y1=y1, y2=y2)

    def _add(self, tag: str, style: str, hint: str = "", **places: str | float) -> None:
        """Draw a shape: texts among its ``places`` are as they are, numbers are pixels."""
        attributes = {k: v if isinstance(v, str) else f"{v:g}" for k, v in places.items()}
        hints = [element("title", hint)] if hint else []
        self._drawn.append(element(tag, *hints, **attributes, style=style))

    def text(self, text: str, kind: str = "plain") -> None:
        """Write a line: ``plain``, ``strong`` or ``faint``."""
        self.label(text, 0, kind)
        self.height += LINE

    def label(self, text: str, at: float, kind: str = "faint", shift: int = 0) -> None:
        """Write at a share of the width, ending there at the right edge, in the middle between."""
        anchor = "end" if at == 1 else "start" if at == 0 or shift else "middle"
        attributes = {"x": _percent(at), "dx": f"{shift}", "y": f"{self.height + 13}"}
        self._drawn.append(element("text", text, **attributes, text_anchor=anchor, class_=kind))

    def figures(self, figures: Sequence[tuple[str, str]], columns: int = 2) -> None:
        """Write large figures side by side, each above what it is."""
        for row in range(0, len(figures), columns):
            for kind, part in (("large", 0), ("faint", 1)):
                self.height += LINE // 2 * (part == 0)
                for number, figure in enumerate(figures[row : row + columns]):
                    self.label(figure[part], number / columns, kind, shift=1)
                self.height += LINE

    def tick(self, text: str, top: float) -> None:
        """Draw a line across at a height, and write at its left end what it stands for."""
        self.line("rest", (0, top), (1, top))
        attributes = {"x": "0", "y": f"{top - 3:g}", "class_": "faint"}
        self._drawn.append(element("text", text, **attributes))

    def scale(self, *labels: str) -> None:
        """Write labels under what was drawn, from its left edge to its right one."""
        for number, label in enumerate(labels):
            self.label(label, number / (len(labels) - 1))
        self.height += LINE

    def legend(self, entries: Sequence[tuple[str, str]], columns: int = 1) -> None:
        """Name colours."""
        for number, (colour, name) in enumerate(entries):
            at = number % columns / columns
            x, y, fill = _percent(at), self.height + 4, f"fill: {_paint(colour)}"
            self._add("rect", fill, width=10, height=10, y=y, x=x)
            self.label(name, at, "plain", shift=16)
            if number % columns == columns - 1 or number == len(entries) - 1:
                self.height += LINE

    def space(self) -> None:
        """Leave some room."""
        self.height += LINE // 2

    def draw(self, name: str, top: int = 0) -> Element:
        """Return the picture, ``name`` being what readers hear who cannot see it."""
        return element(
            "svg",
            *self._drawn,
            xmlns="http://www.w3.org/2000/svg",
            role="img",
            aria_label=name,
            y=f"{top}",
            width="100%",
            height=f"{self.height}",
        )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _paint(colour: str) -> str:
    return f"var(--{colour})"
