"""The places of a model's files, filled from the Hub if need be, and their digests."""

import hashlib
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
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
    here = locate_shards(model)
    return sum(size for name, size in shard_bytes(model).items() if name not in here)


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
