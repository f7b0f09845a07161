"""Writing files that appear whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> bool:
    """Write a file of a cache, folders included; False where the disk does not take it."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # another run may write the same entry: each has its own file until the rename
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
