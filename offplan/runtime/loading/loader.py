"""Weights are brought from safetensors files straight to where they live."""

import contextlib
import os
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from offplan.checkpoint.tensors import TensorInfo
from offplan.progress import Progress
from offplan.runtime.device import on_device
from offplan.runtime.loading.mapping import Conversion, Target
from offplan.runtime.loading.shards import Shards
from offplan.runtime.loading.staging import Part, Reader, split_parts, stored_dtype

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Threads that read: a read is a copy out of the page cache, which one core does below the speed
of memory; each costs two staging buffers."""


def load_weights(
    folder: Path,
    targets: Mapping[str, Target],
    destinations: Mapping[str, torch.Tensor],
    on_progress: Progress | None = None,
) -> None:
    """Fill every destination (by parameter name) from the files in ``folder``.

    Tensors are read file by file in the order they are stored, in parts, by a few threads, each
    straight to its place; what is converted is staged one parameter at a time after that. On CUDA
    all copies are done on return.

    Raises CheckpointError when a file is missing, cut short or changed, or a tensor is not what
    the model wants, and MemoryLimitError when there is no room for the staging buffers.
    """
    straight = [target for target in targets.values() if target.conversion is None]
    conversions = {id(t.conversion): t.conversion for t in targets.values() if t.conversion}
    parts = _in_file_order(
        (piece.tensor, piece.select(destinations[target.name]))
        for target in straight
        for piece in target.pieces
    )
    tensors = {piece.tensor for target in targets.values() for piece in target.pieces}
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with (
        Shards(folder, tensors) as shards,
        _Readers(shards, _cuda_devices(destinations)) as readers,
    ):
        for part in readers.read(parts):
            done += part.nbytes
            if on_progress is not None:
                on_progress(done, total)
        for conversion in conversions.values():
            _convert(conversion, destinations, readers)
            done += sum(tensor.nbytes for _, tensor in conversion.sources)
            if on_progress is not None:
                on_progress(done, total)


def _in_file_order(jobs: Iterable[tuple[TensorInfo, torch.Tensor]]) -> list[Part]:
    parts = [part for tensor, view in jobs for part in split_parts(tensor, view)]
    return sorted(parts, key=lambda part: (part.tensor.shard or "", part.offset))


def _convert(
    conversion: Conversion, destinations: Mapping[str, torch.Tensor], readers: "_Readers"
) -> None:
    """Stage a conversion's tensors, convert them and put the outcome where it lives."""
    staged = [
        torch.empty(tensor.shape, dtype=stored_dtype(tensor)) for _, tensor in conversion.sources
    ]
    stored = (tensor for _, tensor in conversion.sources)
    for _ in readers.read(_in_file_order(zip(stored, staged, strict=True))):
        pass
    for name, value in conversion.convert(staged).items():
        destinations[name].copy_(value)


def _cuda_devices(destinations: Mapping[str, torch.Tensor]) -> set[torch.device]:
    """Find the GPUs that tensors go to: two where the second one is the store."""
    return {value.device for value in destinations.values() if value.is_cuda}


class _Readers:
    """A few threads with a reader each. Use as a context manager."""

    def __init__(self, shards: Shards, devices: Collection[torch.device]) -> None:
        self._idle: queue.SimpleQueue[Reader] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_THREADS):
                reader = Reader(shards, devices)
                stack.callback(reader.close)
                self._idle.put(reader)
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="offplan-load")
            # threads end before the buffers that they fill are given back
            stack.callback(self._threads.shutdown, cancel_futures=True)
            self._closing = stack.pop_all()

    def __enter__(self) -> "_Readers":
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def read(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Read all parts, begun in their order; yield each once it is read.

        The first error is raised; leaving the context then begins no further part.
        """
        futures = [self._threads.submit(self._read, part) for part in parts]
        for future in as_completed(futures):
            yield future.result()

    def _read(self, part: Part) -> Part:
        reader = self._idle.get()
        try:
            with on_device(part.view.device):  # a thread starts on the first GPU
                reader.read(part)
        finally:
            self._idle.put(reader)
        return part


def fill_random(destinations: Mapping[str, torch.Tensor], on_progress: Progress | None) -> None:
    """Fill every destination with random weights: ones for norms, N(0, 0.02) elsewhere.

    The same block of random numbers is tiled from a different start for each tensor, since drawing
    tens of gigabytes would take minutes; routers and experts still differ from one another. Where
    a plan puts a parameter changes none of its numbers.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2**22, generator=generator) * 0.02
    blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    total = sum(destination.nbytes for destination in destinations.values())
    done = 0
    for number, (name, destination) in enumerate(sorted(destinations.items())):
        if destination.ndim == 1 and "norm" in name:
            destination.fill_(1.0)
        else:
            key = (destination.device, destination.dtype)
            if key not in blocks:
                blocks[key] = noise.to(*key)
            _tile(destination.view(-1), blocks[key], start=number * 1_000_003 % noise.numel())
        done += destination.nbytes
        if on_progress is not None:
            on_progress(done, total)


def _tile(flat: torch.Tensor, block: torch.Tensor, start: int) -> None:
    rolled = block.roll(-start)
    for piece in flat.split(rolled.numel()):
        piece.copy_(rolled[: piece.numel()])
