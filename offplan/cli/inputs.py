"""Texts that commands read from files, or from standard input where the file is ``-``."""

import sys
from pathlib import Path

from offplan.cli.output import STANDARD
from offplan.errors import InputError
from offplan.records import read_text

_MOST_BYTES = 2**30
"""Beyond any file of prompts."""
_MARK = "\ufeff"


def read_input(path: Path, what: str) -> str:
    """Read a file in UTF-8, ``what`` it should be being named in errors; raises InputError.

    The mark by which some editors begin a file in UTF-8 is no part of its text.
    """
    if path != STANDARD:
        return read_text(path, what, _MOST_BYTES, InputError).removeprefix(_MARK)
    try:
        return sys.stdin.buffer.read().decode("utf-8").removeprefix(_MARK)
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no {what}, which is text in UTF-8: {error}") from None
