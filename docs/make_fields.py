"""Write the page of the fields of requests, ``docs/fields.md``, from the server's own table.

    python docs/make_fields.py

``tests/test_docs.py`` holds the file to what is written here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from offplan.serve.fields import BOTH, FIELDS, IN_MESSAGES, Field

PAGE = Path(__file__).with_name("fields.md")

HEAD = """\
# Fields of requests

`python docs/make_fields.py` makes this page from the server's table; do not edit it by hand.
[Serving](serving.md#fields) says what happens to a field that is not in it.
"""
USED = "## Used"
REFUSED = """\
## Refused, unless they change nothing

The server does not support these fields. It accepts null, and the values of the second column.
"""
IGNORED = "## Ignored, whatever they hold"


def _list_cells(row: Field) -> Iterator[str]:
    path = "" if row.paths == BOTH else f" ({row.paths[0]})"
    yield f"`{row.name}`{path}"
    if row.status == "refused":
        yield ", ".join(f"`{json.dumps(value)}`" for value in row.neutral) or "null alone"
    yield row.does


def _table(status: str, *heads: str) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in FIELDS:
        if row.status == status:
            yield f"| {' | '.join(_list_cells(row))} |"


def render_page() -> str:
    """Return the whole page."""
    in_messages = ", ".join(f"`{name}`" for name in sorted(IN_MESSAGES))
    lines = [
        *(HEAD, USED, "", *_table("used", "field", "what it does")),
        *("", REFUSED, *_table("refused", "field", "accepted", "what it asks for")),
        *("", IGNORED, "", *_table("ignored", "field", "why")),
        *("", f"Messages and their parts may also have {in_messages}.", ""),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
