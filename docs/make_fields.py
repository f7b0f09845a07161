"""Write the page of the fields of requests, ``docs/fields.md``, from the server's own table.

    python docs/make_fields.py

``tests/test_docs.py`` holds the file to what is written here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from offplan.serve.app import PATHS
from offplan.serve.fields import BOTH, FIELDS, IN_MESSAGES, Field

PAGE = Path(__file__).with_name("fields.md")
OTHERS = Path(__file__).with_name("other_servers.json")
"""Paths of other servers, and those of the table's fields that they have, by their sources."""

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
BESIDE = """\
## Beside other servers

What requests to `/v1/chat/completions` and `/v1/completions` may have, and which paths there are,
by the sources of each server. `neutral` fields may have the values above alone.
"""


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


def _list_others() -> Iterator[str]:
    """Yield the tables of fields and paths, by server."""
    others = json.loads(OTHERS.read_text("utf-8"))
    versions = [f"{name} {other['version']}" for name, other in others.items()]
    says = {"used": "yes", "refused": "neutral", "ignored": "ignored"}
    by_status = sorted(FIELDS, key=lambda row: [*says].index(row.status))
    ours = {row.name: says[row.status] for row in reversed(by_status)}
    ours = dict(reversed(ours.items()))  # what is used for one path is used
    for kind, here in (("fields", ours), ("paths", dict.fromkeys(PATHS, "yes"))):
        names = {name for other in others.values() for name in other[kind]}
        shown = [name for name in [*here, *sorted(names - here.keys())] if name in names]
        yield f"| {kind[:-1]} | offplan | {' | '.join(versions)} |"
        yield "|---" * (2 + len(others)) + "|"
        for name in shown:
            cells = ["yes" if name in other[kind] else "" for other in others.values()]
            yield f"| `{name}` | {' | '.join([here.get(name, ''), *cells])} |"
        yield ""
    sources = [f"{name}'s {other['source']}" for name, other in others.items()]
    yield f"Sources: {'; '.join(sources)}."


def render_page() -> str:
    """Return the whole page."""
    in_messages = ", ".join(f"`{name}`" for name in sorted(IN_MESSAGES))
    lines = [
        *(HEAD, USED, "", *_table("used", "field", "what it does")),
        *("", REFUSED, *_table("refused", "field", "accepted", "what it asks for")),
        *("", IGNORED, "", *_table("ignored", "field", "why")),
        *("", f"Messages and their parts may also have {in_messages}.", ""),
        *(BESIDE, *_list_others(), ""),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
