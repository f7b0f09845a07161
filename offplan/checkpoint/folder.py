"""A checkpoint in a folder: config, index and the headers of its shards; no tensor is read."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offplan.checkpoint.config import (
    GENERATION_NAME,
    NO_GENERATION,
    fingerprint_generation,
    states_quantisation,
)
from offplan.checkpoint.headers import LENGTH_BYTES, header_length, parse_header
from offplan.checkpoint.jsontext import load_config, load_object, quote, shorten
from offplan.checkpoint.tensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Stored, TensorInfo
from offplan.errors import CheckpointError
from offplan.progress import Progress


@dataclass(frozen=True)
class Index:
    """The index says which shard holds which tensor."""

    weight_map: Mapping[str, str]
    """Shard by tensor name; shards are paths relative to the index, checked to stay below it."""
    total_size: int | None
    """Bytes of all tensors, where the index says so."""

    @property
    def shards(self) -> list[str]:
        """The shards' names, sorted."""
        return sorted(set(self.weight_map.values()))


def parse_index(data: bytes, where: str) -> Index:
    """Read an index; raises CheckpointError, naming ``where``, when it is not valid or not safe."""
    content = load_object(data, where)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{where}: found {quote(weight_map)} as weight_map, expected the shard of every "
            "tensor by name; the file is damaged: fetch it again"
        )
    unfit = [shard for shard in weight_map.values() if not isinstance(shard, str)]
    # Few shards hold many tensors: each name is checked once.
    unfit = unfit or [shard for shard in {*weight_map.values()} if not is_inner_path(shard)]
    if unfit:
        raise CheckpointError(
            f"{where}: found shard name {quote(unfit[0])}, expected a file of the checkpoint such "
            "as 'model-00001-of-00002.safetensors'; do not trust this checkpoint"
        )
    return Index(weight_map, _total_size(content.get("metadata")))


def check_against_index(index: Index, tensors: Iterable[TensorInfo], where: str) -> None:
    """Check that the shards hold what the index says, no less, no more and nothing twice.

    Raises CheckpointError naming the first tensor that is twice there, absent, misplaced or
    unlisted.
    """
    found: dict[str, str | None] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise CheckpointError(
                f"{where}: found tensor {quote(tensor.name)} in {quote(found[tensor.name])} and in "
                f"{quote(tensor.shard)}, expected once; the shards are not of one checkpoint"
            )
        found[tensor.name] = tensor.shard
    differing = {name for name, _ in index.weight_map.items() ^ found.items()}
    if not differing:
        return
    name = min(differing)
    listed, held = index.weight_map.get(name), found.get(name)
    if held is None:
        problem = f"is absent from the shards, expected in {quote(listed)}"
    elif listed is None:
        problem = f"is in {quote(held)} but not in the index, expected in both"
    else:
        problem = f"is in {quote(held)}, expected in {quote(listed)} as {INDEX_NAME} says"
    raise CheckpointError(
        f"{where}: tensor {quote(name)} {problem} ({len(differing)} tensors differ); index and "
        "shards are not of one checkpoint: fetch both again"
    )


def is_inner_path(text: str) -> bool:
    """Return True if a path stays below the folder it is taken from, whatever the separators."""
    return (
        text.isprintable()
        and len(text) <= 255
        and set("\\:").isdisjoint(text)
        and {"", ".", ".."}.isdisjoint(text.split("/"))
    )


def _total_size(metadata: Any) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some writers leave a float
        total = int(total)
    return total if type(total) is int and 0 <= total < 2**63 else None


ADAPTER_NAME = "adapter_config.json"
ADAPTER_ALONE = (
    "found an adapter (LoRA and the like), expected a model; merge it into its base model "
    "(peft: merge_and_unload, then save_pretrained) and name the result"
)
"""The words on an adapter without its base model, and on one that was saved unmerged."""
QUANTISATION_NAME = "hf_quant_config.json"
"""File in which ModelOpt says how it quantised, beside a config that may not say it."""
MAX_JSON_BYTES = 256 * 2**20
"""Bytes of the longest config or index that is read; DeepSeek-R1's index has 9 MB."""


def read_folder(folder: Path, on_progress: Progress) -> Stored:
    """Read a folder of ``config.json`` and safetensors.

    ``on_progress`` hears (shards read, shards in all). Raises CheckpointError.
    """
    config = read_config(folder / CONFIG_NAME)
    index = None
    # The order in which transformers looks for them.
    if is_file(folder / SINGLE_NAME):
        shards = [SINGLE_NAME]
    elif is_file(folder / INDEX_NAME):
        index = read_index(folder / INDEX_NAME)
        shards = index.shards
        _check_present(folder, shards)
    else:
        raise CheckpointError(_no_weights(folder))
    tensors: list[TensorInfo] = []
    for done, shard in enumerate(shards, start=1):
        tensors += read_shard(folder / shard, shard)
        on_progress(done, len(shards))
    if index is not None:
        check_against_index(index, tensors, str(folder / INDEX_NAME))
    return Stored(config, tuple(tensors), generation=read_generation(folder))


def read_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json``, and beside it how ModelOpt quantised where it does not say so.

    Raises CheckpointError when it is absent or not a JSON object.
    """
    if not is_file(path):
        if is_file(path.parent / ADAPTER_NAME):
            raise CheckpointError(f"{path.parent}: {ADAPTER_ALONE}")
        raise CheckpointError(
            f"{path.parent}: found no {path.name}, expected a checkpoint with one; "
            "name the folder that holds it"
        )
    config = load_config(read_small(path), str(path))
    beside = path.parent / QUANTISATION_NAME
    if states_quantisation(config) or not is_file(beside):
        return config
    stated = load_config(read_small(beside), str(beside)).get("quantization")
    own = stated if isinstance(stated, dict) else {}
    return config | {"quantization_config": own | {"quant_method": "modelopt"}}


def read_generation(folder: Path) -> str:
    """Return the fingerprint of a folder's generation config, ``NO_GENERATION`` without any.

    Raises CheckpointError when it cannot be read.
    """
    path = folder / GENERATION_NAME
    return fingerprint_generation(read_small(path)) if is_file(path) else NO_GENERATION


def read_index(path: Path) -> Index:
    """Read an index file; raises CheckpointError when it is not valid."""
    return parse_index(read_small(path), str(path))


def read_shard(path: Path, shard: str) -> list[TensorInfo]:
    """Read one safetensors file's header and nothing after it; raises CheckpointError."""
    with _reading(path), path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = header_length(file.read(LENGTH_BYTES), file_bytes, str(path))
        header = file.read(length)
    return parse_header(header, file_bytes, shard, str(path))


def is_file(path: Path) -> bool:
    """Return True if a regular file stands here (a pipe would block); raises CheckpointError."""
    with _reading(path):
        return path.is_file()


def read_small(path: Path) -> bytes:
    """Read a file of MAX_JSON_BYTES at most; raises CheckpointError."""
    with _reading(path), path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path}: found more than {MAX_JSON_BYTES} bytes, expected a small JSON file"
        )
    return data


def _check_present(folder: Path, shards: list[str]) -> None:
    missing = [shard for shard in shards if not is_file(folder / shard)]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, the first is "
            f"{quote(missing[0])}; finish the download, or correct {INDEX_NAME}"
        )


def _no_weights(folder: Path) -> str:
    with _reading(folder):
        names = sorted(path.name for path in folder.iterdir())
    expected = f"expected {SINGLE_NAME} or {INDEX_NAME}"
    if any(name.endswith(".safetensors") for name in names):
        return f"{folder}: found safetensors but no {INDEX_NAME}, {expected}; fetch the index too"
    other = next((name for name in names if name.endswith((".bin", ".pth", ".pt"))), None)
    if other is not None:
        return f"{folder}: found {quote(other)}, {expected}; convert the weights to safetensors"
    return (
        f"{folder}: found no weights, {expected}; fetch them with `hf download`, "
        "or plan from the config alone: name "
        f"{shlex.quote(str(folder / CONFIG_NAME))}"
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the system's refusals into a CheckpointError that names what was to be read."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"{shorten(str(path))}: cannot be read ({reason}); check the path and its permissions"
        ) from None
