"""Headers from the Hub kept on disk, so that a second run and offline mode need no network.

One file a shard under ``HF_HOME/offplan/headers/<org--name>/<commit>/``: a checksum, the size of
the whole shard (8 bytes, little-endian), then the shard's first bytes as served: length and JSON.
"""

from pathlib import Path
from typing import NamedTuple

from offplan.checkpoint.headers import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from offplan.checkpoint.tensors import TensorInfo
from offplan.files import keep, read_kept


class ShardStart(NamedTuple):
    """The start of a shard."""

    data: bytes
    """Header length and JSON, as in the file; perhaps less of it."""
    file_bytes: int | None
    """Size of the whole shard; None where the server did not say."""

    def parse(self, shard: str, where: str) -> list[TensorInfo]:
        """Return the tensors; raises CheckpointError, naming ``where``, when it is damaged."""
        return parse_header(self.data[LENGTH_BYTES:], self.file_bytes, shard, where)


def cache_path(home: Path, repo: str, commit: str, shard: str) -> Path:
    """Name the file that keeps a shard's header."""
    repo, shard = repo.replace("/", "--"), shard.replace("/", "--")
    return home / "offplan" / "headers" / repo / commit / f"{shard}.header"


def load_start(path: Path) -> ShardStart | None:
    """Return a shard's header, or None when there is none to be read."""
    content = read_kept(path, 8 + LENGTH_BYTES + MAX_HEADER_BYTES)
    if content is None:
        return None
    return ShardStart(content[8:], int.from_bytes(content[:8], "little") or None)


def store_start(path: Path, start: ShardStart) -> None:
    """Keep a header, where the disk takes it; it appears whole or not at all."""
    keep(path, (start.file_bytes or 0).to_bytes(8, "little") + start.data)
