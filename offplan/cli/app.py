"""``offplan`` and its commands.

Nothing heavy is imported here or at the top of a command's file: ``offplan --help`` starts at once.
"""

from typing import Annotated

import typer

import offplan
from offplan.cli.analyze import analyze, plan
from offplan.cli.bench import bench
from offplan.cli.chat import chat
from offplan.cli.check import check
from offplan.cli.command import Command
from offplan.cli.common_options import with_habits
from offplan.cli.diff import diff
from offplan.cli.explain import explain, show
from offplan.cli.export import export
from offplan.cli.machines import machines, models, schema
from offplan.cli.measure import measure
from offplan.cli.replan import replan
from offplan.cli.report import report
from offplan.cli.run import run
from offplan.cli.serve import serve

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 no plan fits, 4 the model, or "
    "what check looks at, is not as the plan says."
)

app = typer.Typer(
    name="offplan",
    help="Plan, then run, a model whose weights do not fit the GPU.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: it starts faster and reads the same in the docs
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offplan {offplan.__version__}")
        raise typer.Exit


@app.callback()
def before_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take options that belong to no command."""


_PLAN = (analyze, plan)
_LOOK_AFTER = (show, report, check, diff, explain, replan)
_EXECUTE = (run, chat, serve, bench, export)
_KNOW = (measure, machines, models, schema)
for command in (*_PLAN, *_LOOK_AFTER, *_EXECUTE, *_KNOW):
    app.command(cls=Command)(with_habits(command))
