"""Files: those that appear whole or not at all, and those that offplan ships."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

StrPath = str | os.PathLike[str]
"""The path of a file or a folder, as the library takes it everywhere."""


def load_facts(path: Path) -> Any:
    """Read a YAML file that offplan ships, by libyaml where it is there, ten times as fast."""
    import yaml

    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def write_whole(path: Path, content: bytes, *, mode: int | None = None, sync: bool = True) -> None:
    """Write a file, replacing what is there; its folder exists.

    It gets ``mode``; left out, what is replaced keeps its own. With ``sync`` it is whole after a
    power failure, too. Raises OSError, which names the file.
    """
    # in the same folder: a rename is atomic only within one file system; and another run may write
    # the same file
    temporary = path.with_name(f".{uuid4().hex}.part")
    if mode is None and path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
    try:
        # who may not read what is replaced may not read this while it is written
        temporary.touch(0o666 if mode is None else 0o600)
        with temporary.open("wb") as file:
            file.write(content)
            if mode is not None:
                temporary.chmod(mode)
            if sync:
                file.flush()
                # a file system may keep the rename, and lose the content that it is of
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # a full disk names no file, and the user knows no temporary one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
