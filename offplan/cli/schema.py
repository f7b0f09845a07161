"""``offplan schema``: the JSON schema of a plan file or a machine profile, for editors."""

from typing import Annotated

import typer

from offplan.choices import FileKind
from offplan.cli import options
from offplan.cli.output import print_json

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
