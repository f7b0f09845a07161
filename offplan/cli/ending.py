"""The command line's end: the one place where errors become exit codes."""

import errno

from offplan.cli.output import print_note
from offplan.errors import OffplanError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
CLOSED_PIPE = 141
"""Exit code where nobody reads the output any more, as shells have it: 128 + SIGPIPE."""
_NO_THREAD = "can't start new thread"
"""Text of Python's RuntimeError if there is no memory for another thread's stack."""


def tell(error: BaseException) -> int:
    """Say what ended a command, in a line, and return its exit code; raises what is a mistake here.

    An OSError is a full disk or a lost network share. A module that cannot be imported, or fails
    without saying why, is a broken installation or too little memory. No traceback helps.
    """
    if _is_interrupt(error):
        print_note("interrupted")
        return INTERRUPTED
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        error = MemoryError(error)
    if not isinstance(error, (OffplanError, OSError, MemoryError, ImportError, SystemError)):
        raise error
    text = str(error)
    if isinstance(error, MemoryError):
        text = f"out of memory{text and f' ({text})'}: raise the limit, or close what else takes it"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        # what writes a file names it
        text = f"standard output cannot be written ({error.strerror}): make room where it leads"
    elif isinstance(error, (ImportError, SystemError)):
        cause = text.strip().rpartition("\n")[2]  # numpy's text is a page, which ends with it
        text = f"a module cannot be used ({cause}): install offplan again, or give it memory"
    if isinstance(error, BrokenPipeError):  # nobody listens, and that is no news
        return CLOSED_PIPE
    print_note(" ".join(text.split()), getattr(error, "topic", None))
    return error.exit_code if isinstance(error, OffplanError) else OffplanError.exit_code


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True if an error came of a Ctrl-C, which transformers' import makes an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
