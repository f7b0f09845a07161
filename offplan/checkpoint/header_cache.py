"""Headers from the Hub kept on disk, so that a second run and offline mode need no network.

One file a shard under ``HF_HOME/offplan/headers/<org--name>/<commit>/``.
"""

from typing import NamedTuple

from offplan.checkpoint.headers import LENGTH_BYTES, MAX_HEADER_BYTES, header_length, parse_header
from offplan.checkpoint.tensors import TensorInfo
from offplan.disk_cache import KeptAnswers

_SIZE_BYTES = 8
_GGUF = b"GGUF"
"""The first bytes of a GGUF file, whose header is as long as its reader finds."""


class ShardStart(NamedTuple):
    """The start of a shard."""

    data: bytes
    """Header length and JSON, as in the file, perhaps less of it; all of a GGUF file's header."""
    file_bytes: int | None
    """Size of the whole shard; None if the server did not say."""

    def parse(self, shard: str, where: str) -> list[TensorInfo]:
        """Return the tensors; raises CheckpointError, naming ``where``, when it is damaged."""
        return parse_header(self.data[LENGTH_BYTES:], self.file_bytes, shard, where)


def find_header(repo: str, commit: str, shard: str) -> ShardStart | None:
    """Return a shard's header, or None if none is kept that can be believed."""
    return _HEADERS.find(*_place(repo, commit, shard))


def keep_header(repo: str, commit: str, shard: str, start: ShardStart) -> None:
    """Keep a shard's header, where the disk takes it and it is no longer than is read again."""
    if len(start.data) > LENGTH_BYTES + MAX_HEADER_BYTES:
        return
    key, name = _place(repo, commit, shard)
    _HEADERS.keep(key, start, name)


def _place(repo: str, commit: str, shard: str) -> tuple[dict[str, str], str]:
    """Return the key and the file's name of a shard's header."""
    folder, file = repo.replace("/", "--"), shard.replace("/", "--")
    key = {"repo": repo, "commit": commit, "shard": shard}
    return key, f"{folder}/{commit}/{file}.header"


def _encode(start: ShardStart) -> bytes:
    return (start.file_bytes or 0).to_bytes(_SIZE_BYTES, "little") + start.data


def _decode(content: bytes) -> ShardStart:
    size, data = content[:_SIZE_BYTES], content[_SIZE_BYTES:]
    start = ShardStart(data, int.from_bytes(size, "little") or None)
    if data.startswith(_GGUF):
        return start
    if len(data) != LENGTH_BYTES + header_length(data[:LENGTH_BYTES], start.file_bytes, "kept"):
        raise ValueError("this is not a whole header")
    return start


_HEADERS = KeptAnswers("headers", _SIZE_BYTES + LENGTH_BYTES + MAX_HEADER_BYTES, _encode, _decode)
"""The shard's size (8 bytes, little-endian), then its first bytes as served: all of its header."""
