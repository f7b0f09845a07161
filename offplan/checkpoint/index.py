"""The index of a sharded checkpoint, ``model.safetensors.index.json``."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offplan.checkpoint.jsontext import is_text, load_object, quote
from offplan.checkpoint.tensors import INDEX_NAME, TensorInfo
from offplan.errors import CheckpointError


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
    for name in weight_map:
        if not is_text(name):
            raise CheckpointError(
                f"{where}: tensor {quote(name)} has a name that is not valid text"
            )
    known: set[str] = set()
    for shard in weight_map.values():
        # Few shards hold many tensors: each name is checked once.
        if not isinstance(shard, str) or shard not in known:
            _check_shard_name(shard, where)
            known.add(shard)
    return Index(weight_map, _total_size(content.get("metadata")))


def check_against_index(index: Index, tensors: Iterable[TensorInfo], where: str) -> None:
    """Check that the shards hold what the index says, no less and no more.

    Raises CheckpointError naming the first tensor that is absent, misplaced or unlisted.
    """
    found = {tensor.name: tensor.shard for tensor in tensors}
    absent = index.weight_map.keys() - found.keys()
    if absent:
        name = min(absent)
        raise CheckpointError(
            f"{where}: {_first_of(absent)} absent from the shards, expected in "
            f"{quote(index.weight_map[name])}; index and shards are not of one checkpoint: fetch "
            "both again"
        )
    unlisted = found.keys() - index.weight_map.keys()
    if unlisted:
        raise CheckpointError(
            f"{where}: {_first_of(unlisted)} in {quote(found[min(unlisted)])} but not in the "
            "index, expected in both; index and shards are not of one checkpoint: fetch both again"
        )
    for name, shard in index.weight_map.items():
        if found[name] != shard:
            raise CheckpointError(
                f"{where}: found tensor {quote(name)} in {quote(found[name])}, expected in "
                f"{quote(shard)} as {INDEX_NAME} says; fetch index and shards again"
            )


def check_unique(tensors: Iterable[TensorInfo], where: str) -> None:
    """Check that no two shards hold a tensor of the same name; raises CheckpointError."""
    seen: dict[str, str | None] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(
                f"{where}: found tensor {quote(tensor.name)} in {quote(seen[tensor.name])} and in "
                f"{quote(tensor.shard)}, expected once; the shards are not of one checkpoint"
            )
        seen[tensor.name] = tensor.shard


def _first_of(names: Collection[str]) -> str:
    rest = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {quote(min(names))}{rest}"


def _check_shard_name(shard: object, where: str) -> None:
    """Refuse a shard that could stand outside the checkpoint, whatever the system's separators."""
    if isinstance(shard, str) and is_text(shard):
        plain = shard.isprintable() and not shard.startswith("/")
        parts = shard.split("/")
        hidden = any(part in ("", ".", "..") for part in parts)
        if plain and not hidden and "\\" not in shard and ":" not in shard and len(shard) <= 255:
            return
    raise CheckpointError(
        f"{where}: found shard name {quote(shard)}, expected a file of the checkpoint such as "
        "'model-00001-of-00002.safetensors'; do not trust this checkpoint"
    )


def _total_size(metadata: Any) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers leave a float.
    return int(total) if type(total) is int or (type(total) is float and total == total) else None
