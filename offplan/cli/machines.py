"""``offplan machines`` and ``offplan schema``: profiles that come along, and schemas of files."""

from typing import Annotated

import typer

from offplan.choices import FileKind
from offplan.cli import options
from offplan.cli.output import print_json, print_result


def machines(
    machine: Annotated[
        str | None,
        typer.Argument(
            metavar="[MACHINE]", help="Show this one, named as --machine takes it: rtx4090."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the machines that can be planned for, or show one with the source of each figure."""
    from offplan.machine.profile import load_profile, shipped_profiles
    from offplan.report.machine import machine_payload, render_machines, render_sources

    if machine is not None:
        shown = load_profile(machine)
        print_result({"machine": machine_payload(shown)}, render_sources(shown), json=json)
        return
    shipped = {name: load_profile(name) for name in shipped_profiles()}
    payload = {name: machine_payload(each) for name, each in shipped.items()} if json else {}
    print_result({"machines": payload}, render_machines(shipped), json=json)


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    file: Annotated[
        FileKind, typer.Argument(**options.choice(FileKind), help="Which file's.")
    ] = "plan",
) -> None:
    """Print the JSON schema of a plan file, or of a machine profile, for editors."""
    from offplan.machine.profile import profile_schema
    from offplan.plan import Plan

    wanted = Plan.model_json_schema() if file == "plan" else profile_schema()
    print_json({"$schema": _DIALECT, **wanted})
