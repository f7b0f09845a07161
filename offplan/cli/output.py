"""Where results go: reports and JSON to stdout, everything else to stderr, files whole or not."""

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from offplan.errors import InputError
from offplan.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def print_report(*parts: "RenderableType") -> None:
    """Print tables to stdout, an empty line between them."""
    _print_parts(parts, sys.stdout, record=False)


def draw_report(title: str, *parts: "RenderableType") -> str:
    """Return what ``print_report`` prints as a picture: an SVG with a ``title`` over it."""
    from rich._export_format import CONSOLE_SVG_FORMAT

    # Rich's own names a font to be fetched: a picture that is opened should ask nobody.
    layout = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    layout = layout.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    console = _print_parts(parts, io.StringIO(), record=True)
    return console.export_svg(title=title, code_format=layout)


def _print_parts(parts: "Sequence[RenderableType]", file: IO[str], *, record: bool) -> "Console":
    from rich.console import Console

    from offplan.report.table import WIDTH

    console = Console(width=WIDTH, highlight=False, soft_wrap=False, file=file, record=record)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)
    return console


def print_json(payload: dict[str, Any]) -> None:
    """Print one JSON document to stdout, and nothing else."""
    print(json.dumps(payload, indent=2, allow_nan=False))


def print_note(text: str) -> None:
    """Say something that is not the result, on stderr."""
    print(f"offplan: {text}", file=sys.stderr, flush=True)


_BAR_WIDTH = 30


class ProgressBar:
    """A bar on stderr, for people who watch: silent unless stderr is a terminal."""

    def __init__(self, what: str) -> None:
        """Begin to show ``what`` is done: ``reading headers``."""
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


def check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse outputs that ``write_file`` would refuse, before the work is done.

    Raises InputError.
    """
    named = [path for path in paths if path is not None]
    for path in named:
        target = _follow(path)
        if target.is_dir():
            raise InputError(f"{path} is a folder; name a file")
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise InputError(f"{path} is a device, a pipe or a link to itself; name a file")
        if target.exists() and not force:
            raise InputError(f"{path} exists; --force overwrites it")
        if not target.parent.is_dir():
            raise InputError(f"the folder of {path} does not exist; create it first")
        if not os.access(target.parent, os.W_OK):
            raise InputError(f"the folder of {path} cannot be written to; name another one")
    if len(set(map(_follow, named))) < len(named):
        raise InputError(f"{named[0]} is named for two outputs; name two files")


def write_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file so that it appears whole or not at all, where a link leads if it is one.

    Raises InputError if it exists and ``force`` is not given, and OSError.
    """
    check_writable(path, force=force)
    write_whole(_follow(path), text.encode())


def _follow(path: Path) -> Path:
    """Return where a link leads, as far as it does: a file is replaced there, the link stays."""
    return Path(os.path.realpath(path))
