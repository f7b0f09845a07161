"""The first bytes of large files, read over HTTP and kept on disk.

A second run and offline mode need no network: each shard's header is one file under
``HF_HOME/offplan/headers/<org--name>/<commit>/``.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from offplan.checkpoint.answers import AGENT, CLIENT, HTTPError, checked_session
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


RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts; one attempt more than there are waits."""
_MAX_RETRY_AFTER_S = 15.0
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_PATIENCE_S = 30.0
_LEAST_BYTES_PER_S = 16 * 1024
"""A read may take so long and so much longer for its bytes. The client's own timeout starts anew
with every byte, so that a server that lets them drip would hold it for ever."""

_NEVER = (CLIENT.UnsupportedProtocol, CLIENT.ProxyError)
"""Errors that another attempt does not mend."""

_Result = TypeVar("_Result")


class Cut(Exception):
    """The connection ended before the bytes asked for had come."""


def read_header(url: str, guess_bytes: int, where: str) -> ShardStart:
    """Read a safetensors file's length and JSON; ``guess_bytes`` are asked for at first.

    The requests are ranged and go through huggingface_hub's own session. Raises CheckpointError,
    naming ``where``, when the length cannot be right, and what huggingface_hub and its HTTP client
    raise once the retries are used up.
    """
    data, file_bytes = read_start(url, 0, guess_bytes)
    wanted = LENGTH_BYTES + header_length(data, file_bytes, where)
    if len(data) < wanted:
        rest, total = read_start(url, len(data), wanted)
        data, file_bytes = data + rest, file_bytes or total
    return ShardStart(data[:wanted], file_bytes)


def read_start(url: str, first: int, end: int) -> ShardStart:
    """Read bytes ``first`` to ``end`` (exclusive; fewer where the file ends) and the file's size.

    Raises what ``read_header`` does.
    """
    return retry(lambda: _read(url, first, end))


def retry(ask: Callable[[], _Result]) -> _Result:
    """Ask the Hub, and again after a while where it was busy or the connection broke."""
    for wait_s in RETRY_WAITS_S:
        try:
            return ask()
        except (HTTPError, Cut, errors.LocalEntryNotFoundError) as error:
            retry_after_s = _retry_after_s(error)
            if retry_after_s is None:
                raise
        time.sleep(max(wait_s, retry_after_s))
    return ask()


def _read(url: str, first: int, end: int) -> ShardStart:
    """Read bytes ``first`` to ``end`` (exclusive; fewer where the file ends)."""
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    headers = build_hf_headers(library_name=AGENT, headers={"Range": f"bytes={first}-{end - 1}"})
    with (
        checked_session() as session,
        session.stream("GET", url, headers=headers, timeout=timeout_s) as response,
    ):
        ranged = response.status_code == 206
        file_bytes = _file_bytes(response, ranged)
        if ranged and not response.headers.get("Content-Range", "").startswith(f"bytes {first}-"):
            raise Cut(f"asked for bytes from {first}, the server sent others")
        # A server that ignores Range sends the file from its start, and all of it: leaving this
        # block closes the connection, so that only what is read here crosses the network.
        skip = 0 if ranged else first
        wanted = skip + end - first
        data = bytearray()
        ends_at = time.monotonic() + _PATIENCE_S + wanted / _LEAST_BYTES_PER_S
        # As they arrive: chunks of a set size would be waited for.
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= wanted:
                break
            if time.monotonic() > ends_at:
                raise Cut(f"only {len(data)} of {wanted} bytes came in time")
    present = wanted if file_bytes is None else min(wanted, skip + max(0, file_bytes - first))
    if len(data) < present:
        raise Cut(f"{len(data)} of {present} bytes came")
    return ShardStart(bytes(data[skip:wanted]), file_bytes)


def _file_bytes(response: Any, ranged: bool) -> int | None:
    """Return the size of the whole file as the answer states it."""
    stated = response.headers.get("Content-Range" if ranged else "Content-Length", "")
    return _whole_number(stated.rpartition("/")[2])


def _retry_after_s(error: Exception) -> float | None:
    """Return the least wait before another attempt, None when another would be no use."""
    if isinstance(error, errors.LocalEntryNotFoundError):
        # Found neither at the Hub nor on disk: for lack of a network, or for what the Hub answered.
        if not isinstance(error.__cause__, errors.HfHubHTTPError):
            return None
        error = error.__cause__
    if isinstance(error, _NEVER):
        return None
    if not isinstance(error, errors.HfHubHTTPError):
        return 0.0
    if error.response.status_code not in _RETRIED_STATUSES:
        return None
    return min(
        _whole_number(error.response.headers.get("Retry-After", "")) or 0, _MAX_RETRY_AFTER_S
    )


def _whole_number(text: str) -> int | None:
    """Read a number of a header, None where it is none or has more digits than any size."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
