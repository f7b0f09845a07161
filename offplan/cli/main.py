"""The command line's start; ``ending`` has what ends it.

Nothing is imported here that Python has not imported before: until ``_run`` begins, a Ctrl-C ends
in a traceback.
"""

import atexit
import gc
import os
import sys
from io import TextIOWrapper


class ClosedOutput(TextIOWrapper):
    """Standard output that the shell has closed: it takes no text.

    Its descriptor leads to no file, so that what compiled code prints does no harm.
    """

    def writable(self) -> bool:
        """Return False: it takes no text."""
        return False

    def write(self, text: str) -> int:
        """Raise OffplanError, unless there is nothing to write."""
        from offplan.cli.output import check_stdout

        if text:
            check_stdout()
        return len(text)


def main() -> None:
    """Run the command line; always ends in ``SystemExit``."""
    code = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # the interpreter would try once more, and end in a traceback
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        from offplan.cli.ending import tell

        code = code or tell(error)
    sys.exit(code)


def _run() -> int | str | None:
    """Run a command, and return its exit code."""
    try:
        _prepare_streams()
        _check_docstrings()
        _look_for_little_garbage()
        _let_waiting_threads_sleep()
        # it takes a while, in which people may have thought better of it
        from offplan.cli.app import app

        app(prog_name="offplan")
    except SystemExit as ended:
        from offplan.cli.ending import CLOSED_PIPE, INTERRUPTED, tell

        # typer has made exits of a Ctrl-C inside a command, and of a pipe that nobody reads
        if ended.code == INTERRUPTED:
            return tell(KeyboardInterrupt())
        return CLOSED_PIPE if isinstance(ended.__context__, BrokenPipeError) else ended.code
    except (Exception, KeyboardInterrupt) as error:
        from offplan.cli.ending import tell

        return tell(error)
    return 0


def _check_docstrings() -> None:
    """Raise InputError if Python leaves docstrings out, of which transformers makes code."""
    if sys.flags.optimize > 1:
        from offplan.errors import InputError

        raise InputError(
            f"found Python at optimisation level {sys.flags.optimize}, which leaves out docstrings "
            "that transformers needs, expected 0 or 1: unset PYTHONOPTIMIZE, or leave -OO out"
        )


def _look_for_little_garbage() -> None:
    """Spare a third of what torch and transformers take to be imported, and to be left again.

    Their objects live to the end; Python looks through them for cycles time and again.
    """
    gc.set_threshold(50_000)  # objects; 700 would do for garbage that comes as fast as it goes
    atexit.register(_leave_garbage)


def _let_waiting_threads_sleep() -> None:
    """Have threads that wait for each other spin for microseconds, not milliseconds, then sleep.

    libgomp, by which torch computes on the CPU, spins 300,000 times at each barrier. If other
    processes have work, the spinning thread takes the core from the thread it waits for. Beside two
    busy loops on two cores, a first token took 60 to 102 times its prediction. With 1,000 turns,
    which cost an idle machine nothing, it took 1.6 to 1.7 times. libgomp reads the variable once,
    when torch is imported. Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _leave_garbage() -> None:
    """Leave memory to the system to take back, unless a page of warnings would come of it.

    Source: nanobind, by which triton 3.9 is bound, calls leaked what is there at the end.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _prepare_streams() -> None:
    """Have all three standard streams, also where the shell has closed them."""
    # in the order of their descriptors, which else the next files that are opened would get
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or ClosedOutput(open(os.devnull, "wb"))  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: better than no report
