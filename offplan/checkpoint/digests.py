"""Digests of a checkpoint's files, read once: what headers do not cover."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import shard_bytes
from offplan.errors import CheckpointError

_BLOCK_BYTES = 2**24
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NOTE_BYTES = 2**10
"""Beyond what huggingface_hub notes of a file: two digests and a time."""


def locate_shards(model: Model) -> dict[str, Path]:
    """Return where this disk has each shard of a model; nothing is fetched.

    Shards that are not here are left out: all of them, where the model is a config alone.
    """
    source = Path(model.source)
    if model.revision is None:
        return {name: source / name for name in shard_bytes(model) if (source / name).is_file()}
    from offplan.checkpoint.download import find_file

    found = {name: find_file(model.source, name, model.revision) for name in shard_bytes(model)}
    return {name: path for name, path in found.items() if path is not None}


def read_digest(path: Path, on_bytes: Callable[[int], object]) -> str:
    """Read a file whole, and return its SHA-256 in hex; ``on_bytes`` hears of bytes as they come.

    Raises CheckpointError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the disk, or fetch the file again"
        ) from None
    return digest.hexdigest()


def find_hub_digest(path: Path, name: str) -> str | None:
    """Return the SHA-256 that the Hub gave for a file when it was fetched; None without one.

    ``name`` is the file's within its checkpoint. The Hub's cache names a large file's content by
    it, and a folder that the Hub filled has it in ``.cache/huggingface/download``.
    Source: huggingface_hub 1.1 to 2.4, ``hf_hub_download`` and ``_local_folder``.
    """
    named = path.resolve().name if path.is_symlink() else ""
    if not _SHA256.fullmatch(named):
        folder = Path(str(path).removesuffix(name)) / ".cache" / "huggingface" / "download"
        lines = _read_text(folder / f"{name}.metadata").splitlines()
        named = lines[1].strip() if len(lines) > 1 else ""
    return named if _SHA256.fullmatch(named) else None


def _read_text(path: Path) -> str:
    """Return a small text file's content; empty if there is none that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_NOTE_BYTES:
            return ""
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""
