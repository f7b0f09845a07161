"""Anchors of the documentation's pages."""

import re
from pathlib import Path

CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.replace(" ", "-") for each in words}
