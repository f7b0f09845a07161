"""Headers from the Hub kept on disk, so that a second run and offline mode need no network.

One file a shard under ``HF_HOME/offplan/headers/<org--name>/<commit>/``: the size of the whole
shard (8 bytes, little-endian), then the shard's first bytes as served: length and JSON.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from offplan.files import keep


class CachedHeader(NamedTuple):
    """The start of a shard."""

    data: bytes
    """Header length and JSON, as in the file."""
    file_bytes: int | None
    """Size of the whole shard; None where the server did not say."""


class HeaderCache:
    """The headers of one commit of one repository."""

    def __init__(self, home: Path, repo: str, commit: str) -> None:
        self._folder = home / "offplan" / "headers" / repo.replace("/", "--") / commit

    def load(self, shard: str) -> CachedHeader | None:
        """Return a shard's header, or None when there is none to be read."""
        try:
            content = self._path(shard).read_bytes()
        except OSError:
            return None
        if len(content) < 16:
            return None
        return CachedHeader(content[8:], int.from_bytes(content[:8], "little") or None)

    def store(self, shard: str, header: CachedHeader) -> bool:
        """Keep a header; it appears whole or not at all. False where the disk does not take it."""
        content = (header.file_bytes or 0).to_bytes(8, "little") + header.data
        return keep(self._path(shard), content)

    def drop(self, shard: str) -> None:
        """Forget a header that turned out not to be valid."""
        with contextlib.suppress(OSError):
            self._path(shard).unlink()

    def _path(self, shard: str) -> Path:
        return self._folder / (shard.replace("/", "--") + ".header")
