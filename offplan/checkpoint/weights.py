"""The place of a model's files: a folder on disk, filled from the Hub if need be."""

import shutil
from collections import defaultdict
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import CONFIG_NAME
from offplan.errors import CheckpointError, InputError, Topic
from offplan.progress import Progress, silent
from offplan.units import format_bytes

_MIB = 2**20
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

    ``on_progress`` hears (MiB fetched, MiB in all). Raises InputError for a model known from its
    config alone, CheckpointError and HubError.
    """
    require_weights(model)
    if model.revision is None:
        return Path(model.source)
    sizes = shard_bytes(model)
    from offplan.checkpoint.download import fetch_each

    report, missing = on_progress or silent(""), missing_bytes(model)

    def hear(arrived: int) -> None:
        report(min(arrived, missing) // _MIB, missing // _MIB)

    for _ in fetch_each(
        model.source,
        model.revision,
        sizes,
        patience_s=_LONGER_PATIENCE_S,
        on_bytes=hear if missing else None,
    ):
        pass
    return _find_snapshot(model.source, model.revision)


def require_weights(model: Model) -> None:
    """Raise InputError for a model that is known from its config alone, or from a GGUF file."""
    require_checkpoint(model)
    if model.revision is None and Path(model.source).is_dir():
        return
    if model.revision is None or not has_weights(model):
        raise InputError(
            f"{model.source} has no weights: name a folder with weights (`model=DIR`), or run "
            "on random weights (`dummy_weights=True`)"
        )


def missing_bytes(model: Model) -> int:
    """Return the bytes of a model's shards on the Hub that are not in the Hub's cache yet."""
    if model.revision is None:
        return 0
    from offplan.checkpoint.download import find_file

    return sum(
        size
        for name, size in shard_bytes(model).items()
        if find_file(model.source, name, model.revision) is None
    )


def require_fetchable(model: Model) -> None:
    """Raise CheckpointError where a model's weights are to be fetched, and cannot be.

    They cannot if the Hub is not to be asked, or if the disk has no room for them.
    """
    missing = missing_bytes(model)
    if not missing:
        return
    from huggingface_hub import constants

    told = f"{model.source}: {format_bytes(missing)} of weights are not in {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{told}, and HF_HUB_OFFLINE is set: unset it to fetch them, or name a folder that has "
            "them",
            topic=Topic.DOWNLOADS,
        )
    free = _free_bytes(Path(constants.HF_HUB_CACHE))
    if free < missing:
        raise CheckpointError(
            f"{told}, and its disk has {format_bytes(free)} left: make room, or set HF_HOME to a "
            "folder on another disk",
            topic=Topic.DOWNLOADS,
        )


def _free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder, which need not be there yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


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
