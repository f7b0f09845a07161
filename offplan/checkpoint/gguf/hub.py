"""GGUF files of a repository on the Hub, read by their headers alone."""

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.utils import logging

from offplan.checkpoint.answers import AGENT, checked_session
from offplan.checkpoint.failures import explaining
from offplan.checkpoint.gguf.places import (
    QUANTISATION,
    SHARD,
    SUFFIX,
    Found,
    HubName,
    leave_beside,
    list_shards,
)
from offplan.checkpoint.gguf.read import Header, import_reader, read_header, size_headers
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import Model
from offplan.checkpoint.quiet import quietly
from offplan.checkpoint.ranges import ShardStart, find_header, keep_header, read_start, retry
from offplan.errors import CheckpointError
from offplan.progress import Progress

_FIRST_READ_BYTES = 8 * 2**20
"""Bytes asked for at first: enough for most vocabularies."""
_MORE = 4
"""Times as many bytes are asked for while they end within the header."""
_USUAL = "Q4_K_M"
"""The quantisation taken where none is named, as by Ollama."""
_NAMED = re.compile(rf"(?<![A-Za-z0-9])({QUANTISATION})\.gguf$", re.IGNORECASE)


class Repository(NamedTuple):
    """A repository's files at a commit."""

    name: str
    commit: str
    files: list[str]
    """Its GGUF files."""
    others: Sequence[str] = ()


def list_files(repo: str, revision: str | None) -> Repository:
    """List a repository's files; raises CheckpointError and HubError."""

    def ask() -> Repository:
        with checked_session(is_aside=True):
            found = HfApi(library_name=AGENT).model_info(
                repo,
                revision=revision,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
                expand=["siblings", "sha"],
            )
        names = [each.rfilename for each in found.siblings or ()]
        files = sorted(name for name in names if name.lower().endswith(SUFFIX))
        others = sorted({*names}.difference(files))
        return Repository(repo, found.sha or "", files, others)

    with quietly(logging), explaining(repo, revision, "its list of files"):
        return retry(ask)


def read_named(name: HubName, on_progress: Progress, dtype: str | None = None) -> Model:
    """Do what ``read_repository`` does for a name that has the repository in it."""
    repository = list_files(name.repo, name.revision)
    if not repository.files:
        has_weights = any(each.endswith(".safetensors") for each in repository.others)
        raise CheckpointError(
            f"{name.repo}: found no GGUF file there, expected one of {quote(name.wanted)}; "
            + (f"for its safetensors name {name.repo}" if has_weights else "check the name")
        )
    return read_repository(repository, name.wanted, on_progress, dtype)


def read_repository(
    repository: Repository, wanted: str | None, on_progress: Progress, dtype: str | None = None
) -> Model:
    """Read one GGUF model of a repository: ``wanted`` is its quantisation, or its file's name.

    The other arguments are those of ``read_gguf``. Raises CheckpointError and HubError.
    """
    shards = choose(repository, wanted)
    where = f"{repository.name}/{shards[0]}"
    import_reader(where)
    named = _NAMED.search(SHARD.sub(SUFFIX, shards[0]))
    tag = f":{named[1]}" if named else ""
    found = Found((Path(where),), (f"llama-cli -hf {repository.name}{tag}",))
    headers = []
    for done, shard in enumerate(shards):
        on_progress(done, len(shards))
        headers.append(_read_header(repository, shard))
    on_progress(len(shards), len(shards))
    return replace(size_headers(headers, found, on_progress, dtype), revision=repository.commit)


def choose(repository: Repository, wanted: str | None) -> list[str]:
    """Choose one model among a repository's files, and return all its shards, the first first."""
    files = leave_beside(repository.files)
    if wanted is not None:
        part = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        chosen = [name for name in files if part.search(name)]
        if not chosen:
            few = ", ".join(map(quote, files[:4]))
            raise CheckpointError(
                f"{repository.name}: found no GGUF file of {quote(wanted)} among {len(files)} "
                f"({few}{', ...' * (len(files) > 4)}), expected one; name another"
            )
    else:
        chosen = [name for name in files if _USUAL.lower() in name.lower()] or files
    first = min(chosen, key=lambda name: (len(SHARD.sub(SUFFIX, name)), name))
    return list_shards(first)


def _read_header(repository: Repository, name: str) -> Header:
    """Read a file's header from the cache, or else from the network: as many bytes as it takes."""
    where = f"{repository.name}/{name}"
    reader = import_reader(where)
    url = hf_hub_url(repository.name, name, revision=repository.commit, endpoint=constants.ENDPOINT)
    data, size = b"", _FIRST_READ_BYTES
    with tempfile.TemporaryDirectory(prefix="offplan-") as folder:
        start = Path(folder) / "header"
        # a damaged cache is no fault of the checkpoint's: it is read again
        with suppress(CheckpointError):
            if (kept := find_header(repository.name, repository.commit, name)) is not None:
                start.write_bytes(kept.data)
                return read_header(start, where, kept.file_bytes)
        while True:
            with explaining(repository.name, repository.commit, name):
                more, file_bytes = read_start(url, len(data), size)
            data += more
            start.write_bytes(data)
            try:
                header = read_header(start, where, file_bytes)
                needed = ShardStart(data[: header.num_bytes], file_bytes)
                keep_header(repository.name, repository.commit, name, needed)
                return header
            except reader.Cut:
                if len(data) < size or size >= reader.MAX_HEADER_BYTES:
                    raise
            size = min(size * _MORE, reader.MAX_HEADER_BYTES)
