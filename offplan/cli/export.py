"""``offplan export``: a plan as another engine's flags."""

import shlex
from typing import Annotated

import typer

from offplan.cli.options import Engine, JsonOption, LocalModelOption, PlanArgument
from offplan.cli.output import print_json, print_note


def export(
    plan: PlanArgument,
    engine: Annotated[Engine, typer.Option(help="Whose flags.")],
    model: LocalModelOption = None,
    json: JsonOption = False,
) -> None:
    """Print the flags that make an engine do what a plan says, or say why it cannot."""
    from offplan.cli.models import open_planned_model
    from offplan.engines.export import export_notes, export_plan
    from offplan.plan import load_plan
    from offplan.report.payload import JSON_VERSION

    loaded = load_plan(plan)
    found = open_planned_model(loaded, model)
    flags = export_plan(loaded, found, engine.value)
    notes = export_notes(loaded, found, engine.value)
    if json:
        print_json(
            {"offplan": JSON_VERSION, "engine": engine.value, "flags": flags, "notes": notes}
        )
        return
    for note in notes:
        print_note(note)
    if flags:
        print(shlex.join(flags))
