"""The place of a model's files: a folder on disk, filled from the Hub if need be."""

from collections import defaultdict
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import CONFIG_NAME
from offplan.errors import CheckpointError, InputError
from offplan.progress import Progress, silent

_LONGER_PATIENCE_S = 600.0
"""Shards come in blocks of 10 MB, several at once: such patience is enough for 150 kB/s."""


def require_checkpoint(model: Model) -> None:
    """Raise InputError for a model that is known from a GGUF file, of which no plan can be run."""
    if model.gguf is not None:
        raise InputError(
            f"{model.source}: {model.gguf.facts}. No plan is made of it, as none could be run: "
            f"`offplan analyze` prices a safetensors checkpoint of its shape. {model.gguf.remedy}"
        )


def find_weights(model: Model, on_progress: Progress | None = None) -> Path:
    """Return the folder that holds a model's shards, fetched from the Hub if need be.

    ``on_progress`` hears (shards fetched, shards in all). Raises InputError for a model known from
    its config alone, CheckpointError and HubError.
    """
    require_checkpoint(model)
    source = Path(model.source)
    if model.revision is None and source.is_dir():
        return source
    sizes = shard_bytes(model)
    if not sizes or model.revision is None:
        raise InputError(
            f"{model.source} has no weights: name a folder with weights (`model=DIR`), or run "
            "on random weights (`dummy_weights=True`)"
        )
    from offplan.checkpoint.download import fetch_each

    report = on_progress or silent("")
    fetched = fetch_each(model.source, model.revision, sizes, patience_s=_LONGER_PATIENCE_S)
    for done, _ in enumerate(fetched, start=1):
        report(done, len(sizes))
    return _find_snapshot(model.source, model.revision)


def has_weights(model: Model) -> bool:
    """Return True if a model is known from its shards, and not from a config alone."""
    return bool(shard_bytes(model))


def find_small_files(model: Model, filenames: tuple[str, ...]) -> Path:
    """Return a folder that holds those of these files that a model has, fetched if need be.

    Raises CheckpointError and HubError.
    """
    source = Path(model.source)
    if model.revision is None:
        return source if source.is_dir() else source.parent
    from offplan.checkpoint.download import fetch_where_present

    fetch_where_present(model.source, model.revision, filenames)
    return _find_snapshot(model.source, model.revision)


def shard_bytes(model: Model) -> dict[str, int]:
    """Return the bytes of each shard, as its header says."""
    sizes: defaultdict[str, int] = defaultdict(int)
    parameters = (parameter for layer in model.layers for parameter in layer.parameters)
    for tensor in (*(t for parameter in parameters for t in parameter.stored), *model.outside):
        if tensor.shard is not None:
            sizes[tensor.shard] = max(sizes[tensor.shard], tensor.offset + tensor.nbytes)
    return sizes


def _find_snapshot(repo: str, commit: str) -> Path:
    """Return the folder in the Hub's cache that holds the files of a commit."""
    from offplan.checkpoint.download import find_file

    config = find_file(repo, CONFIG_NAME, commit)
    if config is None:
        raise CheckpointError(f"{repo}: {CONFIG_NAME} has gone from the Hub's cache; run it again")
    return config.parent
