"""``offplan export``: a plan as another engine's command."""

from typing import Annotated

import typer

from offplan.choices import ExportFormat
from offplan.cli import options
from offplan.cli.output import JSON_VERSION, print_json, print_note, waiting
from offplan.cli.printable import printable


def export(
    plan: options.Plan,
    engine: options.ExportedTo,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format", **options.choice(ExportFormat), help="How the command is written."
        ),
    ] = "command",
    replan: Annotated[
        bool,
        typer.Option("--replan", help="Export the fastest plan that the engine can run."),
    ] = False,
    model: options.LocalModel = None,
    json: options.Json = False,
) -> None:
    """Print the command by which an engine does what a plan says, or say why it cannot.

    It holds the engine to the plan's type, workload and budget, too. With --replan the same
    question is asked again, of plans that the engine can run.
    """
    from offplan.cli.planning import open_plan
    from offplan.engines.engine import format_version
    from offplan.engines.export import find_engine
    from offplan.engines.formats import render_export
    from offplan.library.exporting import describe_cost, export_here, plan_for

    find_engine(engine)
    loaded, found = open_plan(plan, model)
    if replan:
        with waiting("planning"):
            made = plan_for(loaded, found, engine)
        print_note(f"planned again for {engine}: predicted {describe_cost(loaded, made, found)}")
        loaded = made
    with waiting("planning"):  # where it is refused, for what it would cost
        export = export_here(loaded, found, engine)
    version = format_version(export.version)
    if json:
        payload = {
            "offplan": JSON_VERSION,
            "engine": export.engine.name,
            "version": version,
            "flags": export.flags,
            "command": export.command,
            "environment": dict(export.said.environment),
            "notes": export.notes,
        }
        print_json(payload)
        return
    print_note(f"for {export.engine.title} {version}")
    for note in export.notes:
        print_note(note)
    print(printable(render_export(export, form)), end="")
