"""``offplan export``: a plan as another engine's flags."""

import shlex
from typing import Annotated

import typer

from offplan.choices import EngineName
from offplan.cli import options
from offplan.cli.output import JSON_VERSION, print_json, print_note, printable


def export(
    plan: options.Plan,
    engine: Annotated[EngineName, typer.Option(case_sensitive=False, help="Whose flags.")],
    model: options.LocalModel = None,
    json: options.Json = False,
) -> None:
    """Print the flags that make an engine do what a plan says, or say why it cannot."""
    from offplan.cli.planning import open_plan
    from offplan.engines.export import export_notes, export_plan

    loaded, found = open_plan(plan, model)
    flags = export_plan(loaded, found, engine)
    notes = export_notes(loaded, found, engine)
    if json:
        print_json({"offplan": JSON_VERSION, "engine": engine, "flags": flags, "notes": notes})
        return
    for note in notes:
        print_note(note)
    if flags:
        print(printable(shlex.join(flags)))
