"""Brings weights from safetensors files straight to where they live."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from offplan.errors import CheckpointError
from offplan.runtime.skeleton import Target

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def load_weights(
    folder: Path,
    targets: Mapping[str, Target],
    destinations: Mapping[str, torch.Tensor],
    on_progress: Progress | None = None,
) -> None:
    """Fill every destination (by parameter name) from the files in ``folder``.

    Tensors are read file by file in the order they are stored and copied once, to their place.
    Raises CheckpointError when a file is truncated or a tensor is not what the header said.
    """
    total = sum(piece.tensor.nbytes for target in targets.values() for piece in target.pieces)
    done = 0
    jobs = [(piece, target) for target in targets.values() for piece in target.pieces]
    jobs.sort(key=lambda job: (job[0].tensor.shard or "", job[0].tensor.offset))
    shard, reader = None, None
    for piece, target in jobs:
        if piece.tensor.shard != shard:
            shard = piece.tensor.shard
            reader = _open(folder, shard)
        assert reader is not None
        try:
            stored = reader.get_tensor(piece.tensor.name)
        except Exception as error:  # safetensors has one exception type, defined in its extension
            raise CheckpointError(f"{folder / str(shard)}: {piece.tensor.name}: {error}") from None
        _copy(stored, piece.select(destinations[target.name]), piece.tensor.name)
        done += piece.tensor.nbytes
        if on_progress is not None:
            on_progress(done, total)


def _open(folder: Path, shard: str | None) -> "safe_open":
    if shard is None:
        raise CheckpointError(
            f"{folder} has no weights, only a config: give a folder with safetensors files, or "
            "--dummy-weights"
        )
    try:
        return safe_open(folder / shard, framework="pt")
    except Exception as error:  # as above
        raise CheckpointError(f"cannot read {folder / shard}: {error}") from None


def _copy(stored: torch.Tensor, destination: torch.Tensor, name: str) -> None:
    if stored.shape != destination.shape:
        raise CheckpointError(
            f"{name} has the shape {tuple(stored.shape)}; the model wants "
            f"{tuple(destination.shape)}"
        )
    destination.copy_(stored)


def fill_random(destinations: Mapping[str, torch.Tensor], on_progress: Progress | None) -> None:
    """Fill every destination with random weights: ones for norms, N(0, 0.02) elsewhere.

    The same block of random numbers is tiled from a different start for each tensor, since drawing
    tens of gigabytes would take minutes; routers and experts still differ from one another.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2**22, generator=generator) * 0.02
    blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    total = sum(destination.nbytes for destination in destinations.values())
    done = 0
    for number, (name, destination) in enumerate(destinations.items()):
        flat = destination.reshape(-1) if destination.is_contiguous() else destination
        if destination.ndim == 1 and "norm" in name:
            destination.fill_(1.0)
        else:
            key = (destination.device, destination.dtype)
            block = blocks.setdefault(key, noise.to(*key))
            _tile(flat, block, start=number * 1_000_003 % block.numel())
        done += destination.nbytes
        if on_progress is not None:
            on_progress(done, total)


def _tile(flat: torch.Tensor, block: torch.Tensor, start: int) -> None:
    rolled = block.roll(-start)
    for piece in flat.split(rolled.numel()):
        piece.copy_(rolled[: piece.numel()])
