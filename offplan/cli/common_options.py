"""Options and behaviour of all commands: ``--quiet``, and no word from libraries."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from offplan.cli.output import QUIET, print_note
from offplan.errors import OffplanWarning

Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Print only errors to stderr: no notes, no progress.")
]


def with_habits(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--quiet``, and keep from its output what is not offplan's."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool, **options: Any) -> None:
        before = QUIET.set(quiet)
        try:
            with _libraries_hushed():
                command(*args, **options)
        finally:
            QUIET.reset(before)

    signature = inspect.signature(command)
    option = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet
    )
    # typer and the reference of the commands read what a command declares here
    vars(run)["__signature__"] = signature.replace(
        parameters=[*signature.parameters.values(), option]
    )
    run.__annotations__ = {**command.__annotations__, "quiet": Quiet}
    return run


@contextmanager
def _libraries_hushed() -> Iterator[None]:
    """Keep warnings of libraries from the user, who can do nothing about them; print offplan's own.

    Python's ``-W`` and PYTHONWARNINGS show them to a developer.
    """
    if sys.warnoptions:
        yield
        return
    import logging  # not above: --help does without, and starts sooner

    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", OffplanWarning)
            vars(warnings)["showwarning"] = _show
            yield
    finally:
        logging.disable(before)


def _show(message: Warning | str, *_: object, **__: object) -> None:
    print_note(str(message))
