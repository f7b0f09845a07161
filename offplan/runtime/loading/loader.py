"""Weights are brought from safetensors files straight to where they live."""

import os
import queue
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from offplan.checkpoint.tensors import TensorInfo
from offplan.progress import Progress
from offplan.runtime.device import on_device
from offplan.runtime.loading.fill import Target
from offplan.runtime.loading.packed import Matrix, find_matrices, open_recoding
from offplan.runtime.loading.random_weights import Noise
from offplan.runtime.loading.staging import (
    Extent,
    Reader,
    Shards,
    bytes_of,
    split_extents,
    stored_dtype,
)

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Threads that read: a read is a copy out of the page cache, which one core does below the speed of
memory. Each thread costs two staging buffers."""


def load_weights(
    folder: Path | None,
    targets: Mapping[str, Target],
    destinations: Mapping[str, torch.Tensor],
    on_progress: Progress | None = None,
) -> None:
    """Fill every destination (by parameter name) from the files in ``folder``; None for random.

    Tensors are read file by file in the order they are stored, in extents, by a few threads, each
    straight to its place. Tensors to be converted are staged one parameter at a time after that,
    and tensors to be packed a few runs of rows. On CUDA all copies are done on return.

    Raises CheckpointError when a file is missing, cut short or changed, or a tensor is not what the
    model wants. Raises MemoryLimitError when there is no room for the staging buffers.
    """
    matrices = find_matrices(targets, destinations)
    # what is left over is filled as it is
    plain = {name: target for name, target in targets.items() if not target.is_recoded}
    if folder is None:
        total = sum(destinations[name].nbytes for name in plain)
        total += sum(matrix.tensor.nbytes for matrix in matrices)
        filled = _fill_with_noise(plain, matrices, destinations)
    else:
        tensors = {piece.read for target in targets.values() for piece in target.pieces}
        total = sum(tensor.nbytes for tensor in tensors)
        filled = _fill_from_files(folder, tensors, plain, matrices, destinations)
    done = 0
    with closing(filled):  # or an error would leave threads that write to memory given back
        for num_bytes in filled:
            done += num_bytes
            if on_progress is not None:
                on_progress(done, total)


def _fill_with_noise(
    targets: Mapping[str, Target],
    matrices: Sequence[Matrix],
    destinations: Mapping[str, torch.Tensor],
) -> Generator[int, None, None]:
    """Fill destinations with random weights; yield the bytes of each tensor."""
    noise = Noise({*targets, *(matrix.weight for matrix in matrices)})
    with open_recoding(matrices, _recoding_device(destinations), NUM_THREADS) as recode:
        yield from noise.fill(targets, destinations)
        yield from recode(noise.fill_rows)


def _recoding_device(destinations: Mapping[str, torch.Tensor]) -> torch.device:
    """Return where weights are packed: on the current CUDA device, if one is to hold any."""
    on_gpu = any(value.is_cuda for value in destinations.values())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _fill_from_files(
    folder: Path,
    tensors: Iterable[TensorInfo],
    targets: Mapping[str, Target],
    matrices: Sequence[Matrix],
    destinations: Mapping[str, torch.Tensor],
) -> Generator[int, None, None]:
    """Fill destinations from their stored ``tensors``; yield the bytes that each read has done."""
    # two where a second GPU is the store
    devices = {value.device for value in destinations.values() if value.is_cuda}
    with (
        closing(Shards(folder, tensors)) as shards,
        open_recoding(matrices, _recoding_device(destinations), NUM_THREADS) as recode,
    ):
        turned: dict[Matrix, torch.Tensor] = {}

        def read_rows(matrix: Matrix, start: int, rows: torch.Tensor) -> None:
            if matrix.is_turned:  # its rows lie all over it: it is read once, for all its runs
                if start == 0:
                    turned[matrix] = torch.empty(matrix.tensor.shape[::-1], dtype=rows.dtype)
                    shards.read(matrix.tensor, 0, bytes_of(turned[matrix]))
                stop = start + len(rows)
                rows.copy_(turned[matrix].mT[start:stop])
                if stop == matrix.tensor.shape[0]:
                    del turned[matrix]
                return
            before = start * rows.shape[1] * rows.itemsize
            shards.read(matrix.tensor, before, bytes_of(rows))

        yield from _read_as_stored(shards, devices, targets, destinations)
        yield from recode(read_rows)


def _read_as_stored(
    shards: Shards,
    devices: Collection[torch.device],
    targets: Mapping[str, Target],
    destinations: Mapping[str, torch.Tensor],
) -> Iterator[int]:
    """Read what is held as the checkpoint stores it, or transformers converts it."""
    conversions = {id(t.conversion): t.conversion for t in targets.values() if t.conversion}
    with _reading(shards, devices) as read:
        yield from read(
            (piece.tensor, piece.select(destinations[name]))
            for name, target in targets.items()
            if target.conversion is None
            for piece in target.pieces
        )
        for conversion in conversions.values():
            stored = [source.tensor for source in conversion.sources]
            staged = [torch.empty(tensor.shape, dtype=stored_dtype(tensor)) for tensor in stored]
            num_bytes = sum(read(zip(stored, staged, strict=True)))
            for name, value in conversion.convert(staged).items():
                destinations[name].copy_(value)
            yield num_bytes


Jobs = Iterable[tuple[TensorInfo, torch.Tensor]]
"""Stored tensors, and the view that each fills."""


@contextmanager
def _reading(
    shards: Shards, devices: Collection[torch.device]
) -> Iterator[Callable[[Jobs], Iterator[int]]]:
    """Start a few threads, which end with the context.

    Gives a function that reads jobs, begun in the order of the files, and yields the bytes of each
    extent once it is read. It raises the first error; leaving the context then begins no further
    extent.
    """
    idle: queue.SimpleQueue[Reader] = queue.SimpleQueue()
    with ExitStack() as stack:
        # twice the threads: while a buffer is copied from, its thread fills the one idle longest
        for _ in range(2 * NUM_THREADS):
            idle.put(stack.enter_context(closing(Reader(shards, devices))))
        threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="offplan-load")
        # threads end before the buffers that they fill are given back
        stack.callback(threads.shutdown, cancel_futures=True)

        def read_extent(extent: Extent) -> int:
            reader = idle.get()
            try:
                with on_device(extent.view.device):  # a thread starts on the first GPU
                    reader.read(extent)
            finally:
                idle.put(reader)
            return extent.nbytes

        def read(jobs: Jobs) -> Iterator[int]:
            extents = [extent for tensor, view in jobs for extent in split_extents(tensor, view)]
            extents.sort(key=lambda extent: (extent.tensor.shard or "", extent.offset))
            for future in as_completed([threads.submit(read_extent, extent) for extent in extents]):
                yield future.result()

        yield read
