"""A plan as a page: self-contained, so that it can be opened anywhere and asks nobody."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element, tostring

import offplan
from offplan.report.pictures.canvas import STYLE, element
from offplan.report.portrait import Portrait

_LAYOUT = """\
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.45; }
main { max-width: 56rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.5rem 0; }
h2 { font-size: 1.05rem; margin: 2rem 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 0.6rem; margin: 0.8rem 0; }
.figures div { border: 1px solid var(--rest); border-radius: 6px; padding: 0.6rem 0.8rem; }
.figures b { display: block; font-size: clamp(1.25rem, 6vw, 1.9rem); line-height: 1.3;
  white-space: nowrap; }
.figures span { color: var(--faint); }
p.faint { color: var(--faint); margin: 0.2rem 0 0.6rem; }
pre { overflow-x: auto; font-size: 12px; }
"""


def write_page(portrait: Portrait, file: str, notes: Sequence[str]) -> str:
    """Write a page about a plan and its ``file``; ``notes`` say what is not shown, and why."""
    title, *lines = portrait.say()
    figures = [
        element("div", element("b", figure), element("span", told))
        for figure, told in portrait.headline()
    ]
    parts = [
        element("h1", title),
        element("div", *figures, class_="figures"),
        *(element("p", line) for line in lines),
    ]
    for heading, told, canvas in portrait.draw():
        faint = element("p", told, class_="faint")
        picture = canvas.draw(heading)
        parts.append(element("section", element("h2", heading), faint, picture))
    parts += [element("p", note, class_="faint") for note in notes]
    text = element("pre", file)
    parts.append(element("details", element("summary", "The plan file"), text))
    parts.append(element("p", f"Made by offplan {offplan.__version__}.", class_="faint"))
    return "<!DOCTYPE html>\n" + tostring(
        _document(title, parts), encoding="unicode", method="html"
    )


def _document(title: str, parts: Sequence[Element]) -> Element:
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # a page that a plan's own words are in is to do nothing but show them
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        element("title", title),
        element("style", STYLE + _LAYOUT),
    ]
    body = element("body", element("main", *parts), class_="offplan")
    return element("html", element("head", *head), body, lang="en")
