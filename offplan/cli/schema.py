"""``offplan schema``: the plan file's JSON schema, for editors."""

from offplan.cli.output import print_json


def schema() -> None:
    """Print the JSON schema of a plan file, for editors."""
    from offplan.plan import Plan

    print_json(Plan.model_json_schema())
