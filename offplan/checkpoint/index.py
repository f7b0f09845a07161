"""The index of a sharded checkpoint, ``model.safetensors.index.json``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offplan.checkpoint.jsontext import load_object, quote
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
