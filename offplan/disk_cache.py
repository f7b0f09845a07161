"""Answers kept on disk between runs, each in a file that names the question it answers.

A file ``HF_HOME/offplan/<kind>/<name>`` has a SHA-256 of all behind it, the key's length (8 bytes,
little-endian), the key as JSON, and the answer. A checksum alone would vouch for an answer to
another question that came to lie under this name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any, Generic, TypeVar

from offplan.files import write_whole

FORMAT = 3
"""The version of these files, which each of them states: of another version, none is believed."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class KeptAnswers(Generic[_Answer]):
    """The answers to one kind of question, one file each.

    A key is plain JSON and names all that an answer depends on: a change of anything in it is
    another question. Who can write to HF_HOME can still write a false answer under a true key.
    """

    kind: str
    """The folder's name: ``built``."""
    max_bytes: int
    """Bytes of the longest answer that is read."""
    encode: Callable[[_Answer], bytes]
    decode: Callable[[bytes], _Answer]
    """Raises any exception for bytes that ``encode`` does not write."""

    def find(self, key: Mapping[str, Any], name: str | None = None) -> _Answer | None:
        """Return the answer to ``key``, or None if there is none that can be believed.

        ``name`` is the file's, as for ``keep``.
        """
        asked = self._describe(key)
        content = _read(self._path(asked, name), len(asked) + self.max_bytes)
        if content is None or not content.startswith(asked):
            return None
        try:
            return self.decode(content[len(asked) :])
        # behind a checksum that somebody else wrote may stand anything, and so are the errors
        except Exception:
            return None

    def keep(self, key: Mapping[str, Any], answer: _Answer, name: str | None = None) -> bool:
        """Keep the answer to ``key``; the file appears whole or not at all.

        ``name`` is the file's path in the kind's folder; the key's digest if left out. False if
        the disk does not take the file.
        """
        asked = self._describe(key)
        content = asked + self.encode(answer)
        path = self._path(asked, name)
        if path.parts[0] == "~":  # there is no home: HF_HOME would be a folder of this name here
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # not synced: what a power failure cuts short, its checksum tells
            write_whole(path, hashlib.sha256(content).digest() + content, sync=False)
        except OSError:
            return False
        return True

    def _describe(self, key: Mapping[str, Any]) -> bytes:
        """Return how a file for ``key`` begins, behind its checksum."""
        named = {"kind": self.kind, "format": FORMAT, "key": key}
        text = json.dumps(named, sort_keys=True).encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def _path(self, asked: bytes, name: str | None) -> Path:
        from huggingface_hub import constants

        folder = Path(constants.HF_HOME, "offplan", self.kind)
        return folder / (name or hashlib.sha256(asked).hexdigest()[:32])


@cache
def installed_packages() -> list[str]:
    """Name all packages that are installed, with their versions; reading them takes 0.03 s."""
    return sorted(f"{each.name} {each.version}" for each in distributions())


@cache
def installed_versions() -> dict[str, str]:
    """Name what answers depend on that are worked out here: offplan's source, torch, transformers.

    Of the two packages it is also the digest of their files that pip has listed, since two installs
    from git may have one version.
    """
    named = {}
    for name in ("torch", "transformers"):
        package = distribution(name)
        listed = hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()
        named[name] = f"{package.version} {listed[:32]}"
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            source.update(path.read_bytes())
    return {**named, "offplan": source.hexdigest()[:32]}


def _read(path: Path, max_bytes: int) -> bytes | None:
    """Return what stands behind a file's checksum, or None for anything that does not agree.

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
