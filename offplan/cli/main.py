"""``offplan``: the one place where errors become exit codes.

Nothing heavy is imported here or at the top of a command's file: ``offplan --help`` starts at once.
"""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import offplan
from offplan.cli.analyze import analyze
from offplan.cli.bench import bench
from offplan.cli.export import export
from offplan.cli.measure import measure
from offplan.cli.output import print_note
from offplan.cli.plan import plan
from offplan.cli.run import run
from offplan.cli.schema import schema
from offplan.errors import OffplanError

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 no plan fits, 4 the model is "
    "not the plan's."
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

app = typer.Typer(
    name="offplan",
    help="Plan, then run, a model whose weights do not fit the GPU.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
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


for command in (analyze, plan, run, bench, export, measure, schema):
    app.command()(command)


def main() -> None:
    """Run the command line; always ends in ``SystemExit``."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: better than no report
    try:
        app(prog_name="offplan")
    # an OSError is a full disk or a lost network share: not ours, and no traceback helps
    except (OffplanError, OSError) as error:
        print_note(" ".join(str(error).split()))
        sys.exit(error.exit_code if isinstance(error, OffplanError) else OffplanError.exit_code)
    except (KeyboardInterrupt, SystemExit) as ended:
        # typer has made an exit of a Ctrl-C inside a command
        if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
            raise
        print_note("interrupted")
        sys.exit(INTERRUPTED)
