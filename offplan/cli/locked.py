"""A file that one process appends to: a second one finds the file locked."""

import os
import sys
from pathlib import Path
from typing import IO

from offplan.cli.output import print_note
from offplan.errors import InputError


def open_locked(path: Path) -> IO[str]:
    """Open a file of ASCII to append to, or begin it, and lock it until it is closed.

    The lock is the system's, and ends with the process, however that ends. A file system without
    locks is told of on stderr, and the file is opened all the same.

    Raises InputError if another process has locked the file, and OSError.
    """
    file = path.open("a", encoding="ascii")
    try:
        _lock(file)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"{path} is being written by another offplan run: wait until that ends, or name "
            "another file"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        print_note(f"{path} cannot be locked ({reason}): let no other run write it meanwhile")
    return file


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import errno

        raise OSError(errno.ENOLCK, "no locks")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
