"""``offplan show``: the report of a plan's file."""

from offplan.cli import options
from offplan.cli.output import print_result


def show(plan: options.Plan, json: options.Json = False) -> None:
    """Show what a plan file says: the question, the decision, memory and times.

    Nothing else is read, neither the model nor the machine.
    """
    from offplan.plan import load_plan
    from offplan.report.plan import render_plan_file

    loaded = load_plan(plan)
    print_result(loaded.model_dump(mode="json"), *render_plan_file(loaded), json=json)
