"""Files that appear whole or not at all."""

import os
import stat
from pathlib import Path
from uuid import uuid4

StrPath = str | os.PathLike[str]
"""The path of a file or a folder, as the library takes it everywhere."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, replacing what is there and keeping its mode; its folder exists.

    Raises OSError.
    """
    # in the same folder: a rename is atomic only within one file system; and another run may write
    # the same file
    temporary = path.with_name(f".{uuid4().hex}.part")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    try:
        # who may not read what is replaced may not read this while it is written
        temporary.touch(0o666 if mode is None else 0o600)
        temporary.write_bytes(content)
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
