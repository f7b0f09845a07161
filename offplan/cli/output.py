"""Output of results: reports and JSON to stdout, everything else to stderr, files whole or not."""

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Timer
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from offplan.errors import InputError, OffplanError, Topic
from offplan.report.wording import name_options

if TYPE_CHECKING:
    from rich.console import RenderableType


def printable(text: str) -> str:
    """Write as escapes what a terminal would obey or cannot show; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


JSON_VERSION = 1
QUIET = ContextVar("quiet", default=False)
"""True if a command is to print nothing beside its result."""
STANDARD = Path("-")
"""The name of standard output, and of standard input."""


def print_result(
    payload: dict[str, Any], *parts: "RenderableType", json: bool, file: IO[str] | None = None
) -> None:
    """Print a result to ``file`` or stdout: for scripts its ``payload``, versioned, else tables."""
    if file is sys.stderr and QUIET.get():
        return
    if json:
        print_json({"offplan": JSON_VERSION, **payload}, file)
    else:
        print_report(*parts, file=file)


def print_report(*parts: "RenderableType", file: IO[str] | None = None) -> None:
    """Print tables, an empty line between them, to ``file`` or stdout."""
    from offplan.cli.output import PlainConsole
    from offplan.report.table import report_width

    width = report_width(file or sys.stdout)
    console = PlainConsole(width=width, highlight=False, markup=False, emoji=False, file=file)
    with ExitStack() as stack:
        if not console.is_terminal:
            captured = stack.enter_context(console.capture())
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part, crop=False)  # a command that is to be copied may be longer
    if not console.is_terminal:
        lines = captured.get().split("\n")
        print("\n".join(map(str.rstrip, lines)), end="", file=file, flush=True)


def print_json(payload: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print one JSON document to ``file`` or stdout, and nothing else."""
    print(json.dumps(payload, indent=2, allow_nan=False), file=file)


def print_note(text: str, topic: Topic | None = None) -> None:
    """Print something that is not the result to stderr, unless the command is to be quiet.

    It ends with the link of its ``topic``, where it has one.
    A note that nobody reads, since the pipe is closed, keeps a command from nothing.
    """
    if not QUIET.get():
        more = "" if topic is None else f". See {topic.link}"
        with suppress(BrokenPipeError):
            print(f"offplan: {printable(name_options(text))}{more}", file=sys.stderr, flush=True)


_BAR_WIDTH = 30
_PATIENCE_S = 2.0


class ProgressBar:
    """A bar on stderr, for people who watch: silent unless stderr is a terminal."""

    def __init__(self, what: str) -> None:
        """Begin to show ``what`` is done: ``reading headers``."""
        self._what = what
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        """Show the share that is done, when it has changed by a percent."""
        percent = 100 * done // total if total else 100
        if percent == self._shown or QUIET.get() or not sys.stderr.isatty():
            return
        self._shown = percent
        end = "\n" if percent == 100 else ""
        bar = ("#" * (percent * _BAR_WIDTH // 100)).ljust(_BAR_WIDTH, ".")
        text = f"\r{self._what} [{bar}] {percent:3} % ({done}/{total})"
        print(text, end=end, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on a terminal what is being waited for, once that has taken a while."""
    timer = Timer(_PATIENCE_S, print_note, [f"{what} ..."])
    timer.daemon = True
    if sys.stderr.isatty() and not QUIET.get():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_stdout() -> None:
    """Raise OffplanError if standard output is closed, so that a result would be lost."""
    if not sys.stdout.writable():
        raise OffplanError(
            "standard output is closed, and the result would be printed there: leave it open, or "
            "send it to a file"
        )


def check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse outputs that ``write_file`` would refuse, before the work is done.

    Raises InputError.
    """
    named = [path for path in paths if path is not None]
    for path in named:
        if path == STANDARD:
            continue
        target = _follow(path)
        if target.is_dir():
            raise InputError(f"{path} is a folder; name a file")
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise InputError(f"{path} is a device, a pipe or a link to itself; name a file")
        if target.exists() and not force:
            raise InputError(f"{path} exists; --force overwrites it")
        if not target.parent.is_dir():
            raise InputError(f"the folder of {path} does not exist; create it first")
        _check_room(path, target.parent)
    if len(set(map(_follow, named))) < len(named):
        raise InputError(f"{named[0]} is named for two outputs; name two files")


def _check_room(path: Path, folder: Path) -> None:
    """Make a file in the folder of an output, which leaves no trace.

    Access rights do not say that a file system is full, read-only, or as /proc one of its own.
    """
    import tempfile  # --help does without

    with writing(path), tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name a file that the system refuses to write meanwhile.

    Raises OffplanError if the disk is full or fails, and InputError if no file can be.
    """
    try:
        yield
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OffplanError(f"{why}: make room there, or name another place") from error
        raise InputError(f"{why}: name a file in another folder") from error


def write_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file so that it appears whole or not at all, where a link leads if it is one.

    ``-`` is stdout. Raises InputError if it exists and ``force`` is not given, and where its folder
    takes no file, and OffplanError where the disk is full.
    """
    if path == STANDARD:
        sys.stdout.write(text)
        return
    from offplan.files import write_whole  # it takes a while to import, which --help does without

    check_writable(path, force=force)
    with writing(path):
        write_whole(_follow(path), text.encode())


def save_file(path: Path, text: str, *, force: bool) -> None:
    """Write a file as ``write_file`` does, and say so."""
    write_file(path, text, force=force)
    if path != STANDARD:
        print_note(f"wrote {path}")


def _follow(path: Path) -> Path:
    """Return where a link leads, as far as it does: a file is replaced there, the link stays."""
    return Path(os.path.realpath(path))


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Keep standard output clean of what compiled code prints; ``tokenizers`` does, in Rust."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class PlainConsole(Console):
    """Prints what names say as it stands: ``[/x]`` is no markup, and no terminal obeys an escape.

    Names of models, tensors and machines come from strangers.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render a part of a report, as rich does, with ``printable`` text alone."""
        for segment in super().render(renderable, options):
            yield segment._replace(
                text=segment.text if segment.control else printable(segment.text)
            )
