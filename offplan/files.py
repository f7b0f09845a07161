"""Files that appear whole or not at all, and caches whose files are read as they were written."""

import hashlib
import os
import stat
from importlib.metadata import distribution
from pathlib import Path
from uuid import uuid4

_DIGEST_BYTES = hashlib.sha256().digest_size


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


def answer_path(what: str, *asked: str) -> Path:
    """Name the file of a cache that keeps an answer under all that it depends on.

    That is what was ``asked``, offplan's own source, and torch and transformers: their versions,
    and the digests of their files that pip has listed, since two installs from git may have one
    version.
    """
    from huggingface_hub import constants

    digest = hashlib.sha256()
    for package in map(distribution, ("torch", "transformers")):
        digest.update(f"{package.version}\n{package.read_text('RECORD')}".encode())
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            digest.update(path.read_bytes())
    for part in asked:
        digest.update(hashlib.sha256(part.encode()).digest())
    return Path(constants.HF_HOME, "offplan", what, digest.hexdigest()[:32])


def keep(path: Path, content: bytes) -> bool:
    """Write a file of a cache, folders included; False where the disk does not take it.

    The content stands after its SHA-256, for ``read_kept``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(content).digest() + content)
    except OSError:
        return False
    return True


def read_kept(path: Path, max_bytes: int) -> bytes | None:
    """Return what ``keep`` wrote, or None for anything else that may be there.

    A pipe or a device would be waited for, or never end; neither is opened.
    """
    try:
        if not path.is_file() or path.stat().st_size > _DIGEST_BYTES + max_bytes:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None
