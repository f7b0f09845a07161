"""A plan's pictures one below the other: an SVG file of its own."""

import textwrap
from collections.abc import Sequence
from xml.etree.ElementTree import tostring

from offplan.report.pictures.canvas import LINE, STYLE, Canvas, element
from offplan.report.portrait import Portrait

WIDTH = 800
MARGIN = 24
_CHARACTERS = 104
"""Characters of a line of text that surely fit the width."""


def draw_poster(portrait: Portrait) -> str:
    """Return what is said and drawn of a plan as the text of an SVG file."""
    title, *lines = portrait.say()
    figures = Canvas()
    figures.figures(portrait.headline())
    head, *texts = _write(title, [], "plain"), _write("", lines, "plain")
    canvases = [(title, head), ("The figures", figures), *((title, text) for text in texts)]
    for heading, told, canvas in portrait.draw():
        canvases += [(heading, _write(heading, [told], "faint")), (heading, canvas)]
    top, drawn = MARGIN, []
    for name, canvas in canvases:
        drawn.append(canvas.draw(name, top))
        top += canvas.height + LINE // 2
    height = str(top + MARGIN - LINE // 2)
    inner = element("svg", *drawn, x=str(MARGIN), width=str(WIDTH - 2 * MARGIN), height=height)
    page = element("rect", width="100%", height="100%", style="fill: var(--page)")
    look = element("style", STYLE)
    size = {"width": str(WIDTH), "height": height, "viewBox": f"0 0 {WIDTH} {height}"}
    kind = {"class_": "offplan", "xmlns": "http://www.w3.org/2000/svg"}
    return tostring(element("svg", look, page, inner, **kind, **size), encoding="unicode") + "\n"


def _write(heading: str, lines: Sequence[str], kind: str) -> Canvas:
    """Write a heading and what stands below it."""
    canvas = Canvas()
    canvas.space()
    if heading:
        canvas.text(heading, "strong")
    for line in lines:
        for part in textwrap.wrap(line, _CHARACTERS):
            canvas.text(part, kind)
    return canvas
