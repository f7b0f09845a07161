"""Where results go: reports and JSON to stdout, everything else to stderr, files whole or not."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offplan.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_report(*parts: "RenderableType") -> None:
    """Print tables to stdout, an empty line between them."""
    from rich.console import Console

    from offplan.report.table import WIDTH

    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)


def print_json(payload: dict[str, Any]) -> None:
    """Print one JSON document to stdout, and nothing else."""
    print(json.dumps(payload, indent=2, allow_nan=False))


def print_note(text: str) -> None:
    """Say something that is not the result, on stderr."""
    print(f"offplan: {text}", file=sys.stderr, flush=True)


_BAR_WIDTH = 30


class Progress:
    """A bar on stderr, for people who watch: silent unless stderr is a terminal."""

    def __init__(self, what: str) -> None:
        """``what`` is done: ``reading headers``."""
        self._what = what
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        """Show the share that is done, when it has changed by a percent."""
        percent = 100 * done // total if total else 100
        if percent == self._shown or not sys.stderr.isatty():
            return
        self._shown = percent
        end = "\n" if percent == 100 else ""
        bar = ("#" * (percent * _BAR_WIDTH // 100)).ljust(_BAR_WIDTH, ".")
        text = f"\r{self._what} [{bar}] {percent:3} % ({done}/{total})"
        print(text, end=end, file=sys.stderr, flush=True)


def check_writable(path: Path | None, *, force: bool) -> None:
    """Refuse an output that ``write_file`` would refuse, before the work is done.

    Raises InputError.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file")
    if path.exists() and not force:
        raise InputError(f"{path} exists; --force overwrites it")
    if not path.absolute().parent.is_dir():
        raise InputError(f"the folder of {path} does not exist; create it first")


def write_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file so that it appears whole or not at all.

    Raises InputError if it exists and ``force`` is not given.
    """
    check_writable(path, force=force)
    # in the same folder: a rename is atomic only within one file system
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
