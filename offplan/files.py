"""Writing files that appear whole or not at all."""

import os
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, replacing what is there; its folder exists. Raises OSError."""
    # in the same folder: a rename is atomic only within one file system; and another run may write
    # the same file
    temporary = path.with_name(f".{uuid4().hex}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep(path: Path, content: bytes) -> bool:
    """Write a file of a cache, folders included; False where the disk does not take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError:
        return False
    return True
