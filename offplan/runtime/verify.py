"""Checks before memory is taken: the files are what was read, and what the model wants."""

from collections.abc import Mapping
from pathlib import Path

import torch

from offplan.checkpoint.folder import read_shard
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError, DriftError
from offplan.runtime.skeleton import Target

FLOATS = {"F64", "F32", "F16", "BF16"}
"""Stored types that become the model's own by rounding alone."""


def verify_headers(targets: Mapping[str, Target], state: Mapping[str, torch.Tensor]) -> None:
    """Check stored shapes and types against ``state`` (the model's, of any device).

    Raises CheckpointError naming the first tensor that does not fill its place.
    """
    for name, target in targets.items():
        wanted = state[name]
        for piece in target.pieces:
            tensor, shape = piece.tensor, tuple(piece.select(wanted).shape)
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.name} has the shape {tensor.shape}; the model wants {shape}: the "
                    "config is not that of these weights"
                )
            if wanted.is_floating_point() != (tensor.dtype in FLOATS):
                raise CheckpointError(
                    f"{tensor.name} is stored as {tensor.dtype}; the model wants {wanted.dtype}, "
                    "which it cannot be read as: fetch a checkpoint in bf16, f16 or f32"
                )


def verify_files(folder: Path, targets: Mapping[str, Target]) -> None:
    """Check that the files in ``folder`` are still those whose headers were read.

    Raises CheckpointError for a file that is missing or cut short, DriftError for one that holds
    other tensors.
    """
    wanted: dict[str, list[TensorInfo]] = {}
    for target in targets.values():
        for piece in target.pieces:
            if piece.tensor.shard is None:
                raise CheckpointError(
                    f"{folder} has no weights, only a config: give a folder with safetensors "
                    "files, or --dummy-weights"
                )
            wanted.setdefault(piece.tensor.shard, []).append(piece.tensor)
    for shard, tensors in wanted.items():
        found = {tensor.name: tensor for tensor in read_shard(folder / shard, shard)}
        for tensor in tensors:
            if found.get(tensor.name) != tensor:
                raise DriftError(
                    f"{folder / shard} has changed since its header was read: {tensor.name} is "
                    "not what or where it was; run again, and plan again if the model is another"
                )
