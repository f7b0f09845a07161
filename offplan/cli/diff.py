"""``offplan diff``: what two plans differ in."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offplan.choices import TableFormat
from offplan.cli import options
from offplan.cli.output import ProgressBar, print_note, print_result, printable
from offplan.errors import CheckpointError, DriftError, HubError, InputError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.plan import Plan


def diff(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="[BEFORE] PLAN",
            help="Two plan files; or a git revision, HEAD if left out, and a plan file.",
        ),
    ],
    model: options.LocalModel = None,
    format: Annotated[
        TableFormat,
        typer.Option(**options.choice(TableFormat), help="Tables as text, or for a pull request."),
    ] = "text",
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 where the plans differ, as git diff.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show what changes from one plan to another: question, decision, what moves, what that costs.

    BEFORE is a file, a git revision (that has the same file) or a file there (main:plans/old.yaml).
    Figures are those that the files say. If a prediction is no longer that of its file's decision,
    offplan reports that and prices the decision again.
    """
    from offplan.plan import load_plan
    from offplan.report.diff import difference_payload, markdown_difference, render_difference
    from offplan.upkeep.comparing import compare_plans
    from offplan.upkeep.rewriting import load_revision

    if len(plans) > 2:
        raise InputError(f"{len(plans)} plans are named: name one or two")
    before, path = plans[0] if len(plans) == 2 else "HEAD", Path(plans[-1])
    after = load_plan(path)
    old = load_plan(Path(before)) if Path(before).is_file() else load_revision(before, path)
    difference = compare_plans(old, after, _find_model(old, after, model))
    if format == "markdown" and not json:
        print(printable(markdown_difference(difference)), end="")
    else:
        print_result(difference_payload(difference), *render_difference(difference), json=json)
    if exit_code and not difference.is_empty:
        raise typer.Exit(1)


def _find_model(before: "Plan", after: "Plan", model: str | None) -> "Model | None":
    """Read the headers of the model that both plans are of, by which moves and times are priced.

    The Hub is asked only where something moves.
    """
    from offplan.library.planned import find_planned_model, open_planned_model

    if before.model.headers_sha256 != after.model.headers_sha256:
        print_note("what moves is not told: the plans are of different models")
        return None
    try:
        if before.offload == after.offload:
            found = find_planned_model(after, model)
            return found and open_planned_model(after, found)
        return open_planned_model(after, model, ProgressBar("reading headers"))
    except (CheckpointError, HubError, DriftError) as error:
        if before.offload != after.offload:
            print_note(f"what moves is not told: {error}")
        return None
