"""A checkpoint on the Hub: small files through the Hub's own cache, shards by their headers alone.

Everything goes through huggingface_hub, so HF_ENDPOINT, HF_TOKEN, HF_HOME, proxies and
HF_HUB_OFFLINE mean what they mean there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import logging

from offplan.checkpoint.config import GENERATION_NAME, NO_GENERATION, states_quantisation
from offplan.checkpoint.download import (
    PATIENCE_S,
    fetch,
    fetch_where_present,
    find_file,
    in_threads,
    is_absent,
)
from offplan.checkpoint.failures import NoSuchFile, blaming_cache, explaining
from offplan.checkpoint.folder import (
    ADAPTER_ALONE,
    ADAPTER_NAME,
    QUANTISATION_NAME,
    Index,
    check_against_index,
    read_config,
    read_generation,
    read_index,
    read_shard,
)
from offplan.checkpoint.quiet import quietly
from offplan.checkpoint.ranges import find_header, keep_header, read_header
from offplan.checkpoint.tensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Stored, TensorInfo
from offplan.errors import CheckpointError, HubError
from offplan.forms.recognise import CODE_TYPES
from offplan.progress import Progress

_FIRST_READ_BYTES = 64 * 1024
"""Bytes asked for at first where no index tells how many tensors a shard has."""
_ENTRY_BYTES = 90
"""Bytes that a header spends on a tensor besides its name, rarely more."""


def read_hub(repo: str, revision: str | None, on_progress: Progress) -> Stored:
    """Read a model on the Hub: ``config.json``, the index and every shard's header.

    ``on_progress`` hears (shards read, shards in all). Raises CheckpointError and HubError.
    """
    with blaming_cache(repo):
        return _read(repo, revision, on_progress)


def _read(repo: str, revision: str | None, on_progress: Progress) -> Stored:
    config_path = _fetch_config(repo, revision)
    # huggingface_hub files a download under the commit that the revision stands for.
    commit = config_path.parent.name
    config = read_config(config_path)
    tensors = _read_tensors(repo, commit, on_progress)
    if not states_quantisation(config) and any(t.dtype in CODE_TYPES for t in tensors):
        with suppress(NoSuchFile):
            fetch(repo, QUANTISATION_NAME, commit)
            config = read_config(config_path)
    generation = _read_generation(repo, commit)
    return Stored(config, tuple(tensors), revision=commit, generation=generation)


@contextmanager
def offline() -> Iterator[None]:
    """Ask the Hub for nothing while the context lasts, as HF_HUB_OFFLINE has it.

    A file that is not in the Hub's cache is a CheckpointError. The setting is the process's.
    """
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _read_generation(repo: str, commit: str) -> str | None:
    """Return the fingerprint of a generation config; None if neither cache nor Hub tells."""
    with suppress(HubError):
        fetch_where_present(repo, commit, (GENERATION_NAME,))
    if (path := find_file(repo, GENERATION_NAME, commit)) is not None:
        return read_generation(path.parent)
    return NO_GENERATION if is_absent(repo, GENERATION_NAME, commit) else None


def _read_tensors(repo: str, commit: str, on_progress: Progress) -> list[TensorInfo]:
    single = find_file(repo, SINGLE_NAME, commit) or find_header(repo, commit, SINGLE_NAME)
    if single or find_file(repo, INDEX_NAME, commit) is None:
        with suppress(NoSuchFile):
            return _read_shards(repo, commit, {SINGLE_NAME: _FIRST_READ_BYTES}, on_progress)
    index = read_index(fetch(repo, INDEX_NAME, commit))
    tensors = _read_shards(repo, commit, _guess_sizes(index), on_progress)
    check_against_index(index, tensors, f"{repo}: {INDEX_NAME}")
    return tensors


def _read_shards(
    repo: str, commit: str, sizes: dict[str, int], on_progress: Progress
) -> list[TensorInfo]:
    """Read many shards at once; ``sizes`` are their names and the bytes to ask for at first."""
    tensors: list[TensorInfo] = []
    with quietly(logging), explaining(repo, commit, "headers"):
        read = partial(_read_shard, repo, commit)
        found = in_threads(lambda of: read(*of), sizes.items(), patience_s=PATIENCE_S)
        for done, of_shard in enumerate(found, start=1):
            tensors += of_shard
            on_progress(done, len(sizes))
    return tensors


def _read_shard(repo: str, commit: str, shard: str, size: int) -> list[TensorInfo]:
    """Read a shard's header from the caches, or else from the network."""
    where = f"{repo}: {shard}"
    local = find_file(repo, shard, commit)
    if local is not None:
        return read_shard(local, shard)
    # A damaged cache is no fault of the checkpoint's: it is read again.
    with suppress(CheckpointError):
        if (kept := find_header(repo, commit, shard)) is not None:
            return kept.parse(shard, where)
    url = hf_hub_url(repo, shard, revision=commit, endpoint=constants.ENDPOINT)
    with explaining(repo, commit, shard):
        start = read_header(url, size, where)
    tensors = start.parse(shard, where)
    keep_header(repo, commit, shard, start)
    return tensors


def _guess_sizes(index: Index) -> dict[str, int]:
    """Estimate how long each shard's header is, so that one request brings it and little more."""
    sizes = dict.fromkeys(index.shards, 512)
    for name, shard in index.weight_map.items():
        sizes[shard] += len(name) + _ENTRY_BYTES
    return sizes


def _fetch_config(repo: str, revision: str | None) -> Path:
    try:
        return fetch(repo, CONFIG_NAME, revision)
    except NoSuchFile:
        with suppress(NoSuchFile):
            fetch(repo, ADAPTER_NAME, revision)
            raise CheckpointError(f"{repo}: {ADAPTER_ALONE}") from None
        raise
