"""Stored tensors are read to where they live, through a buffer where they cannot go straight."""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from offplan.checkpoint.folder import read_shard
from offplan.checkpoint.tensors import TORCH_NAMES, TensorInfo
from offplan.errors import CheckpointError
from offplan.hostmem.block import HostBlock
from offplan.runtime.refusal import refuse


class Shards:
    """The safetensors files that hold the given tensors, to be closed.

    Bytes are read, not mapped: mapped pages count as the process's memory until they are unmapped,
    so a file would stand beside its copy.
    """

    def __init__(self, folder: Path, tensors: Iterable[TensorInfo]) -> None:
        """Open the files in ``folder`` and compare each tensor with its file's header.

        Raises CheckpointError for a file that is missing, cut short or changed since the tensors
        were described.
        """
        self._folder = folder
        self._files: dict[str, int] = {}
        by_shard: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            if tensor.shard is None:
                raise CheckpointError(
                    f"{folder} has no weights, only a config: give a folder with safetensors "
                    "files, or `dummy_weights=True`"
                )
            by_shard.setdefault(tensor.shard, []).append(tensor)
        try:
            for shard, expected in by_shard.items():
                self._open(shard, expected)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files; nobody may be reading."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: TensorInfo, start: int, memory: memoryview) -> None:
        """Fill ``memory`` (bytes) from byte ``start`` of a tensor. Any thread may call this.

        Raises CheckpointError when the file ends before, or cannot be read.
        """
        path = self._folder / str(tensor.shard)
        file = self._files[str(tensor.shard)]
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(file, [memory[done:]], tensor.offset + start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {tensor.name} cannot be read ({error.strerror}); check "
                    "the disk, or fetch the file again"
                ) from None
            if count == 0:
                found = tensor.offset + start + done
                raise CheckpointError(
                    f"{path}: the file ends at byte {found}, expected {tensor.name} "
                    f"up to byte {tensor.offset + tensor.nbytes}; it was cut short while it was "
                    "read: fetch it again"
                )
            done += count

    def _open(self, shard: str, expected: Iterable[TensorInfo]) -> None:
        path = self._folder / shard
        stored = {tensor.name: tensor for tensor in read_shard(path, shard)}
        for tensor in expected:
            found = stored.get(tensor.name)
            if found != tensor:
                raise CheckpointError(
                    f"{path}: found {_describe(found)}, expected {_describe(tensor)} for "
                    f"{tensor.name}; the file has changed since its header was read: plan it again"
                )
        self._files[shard] = os.open(path, os.O_RDONLY)


def _describe(tensor: TensorInfo | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{tensor.dtype} {list(tensor.shape)} at byte {tensor.offset}"


EXTENT_BYTES = 16 * 2**20
"""Bytes of the largest read and of a staging buffer: from 4 MiB on the link runs at full rate."""


@dataclass(frozen=True)
class Extent:
    """A run of a stored tensor's bytes and the view that it fills."""

    tensor: TensorInfo
    start: int
    """Offset of the run, in bytes from the start of the tensor."""
    view: torch.Tensor
    """The view to fill, on any device, of any type; contiguous or not."""

    @property
    def offset(self) -> int:
        """Offset of its first byte in the file."""
        return self.tensor.offset + self.start

    @property
    def nbytes(self) -> int:
        """Bytes to read from the file."""
        return self.view.numel() * stored_dtype(self.tensor).itemsize


def split_extents(tensor: TensorInfo, destination: torch.Tensor) -> list[Extent]:
    """Cut what fills ``destination``, of its shape, into extents of EXTENT_BYTES, in file order."""
    itemsize = stored_dtype(tensor).itemsize
    views = list(_split(destination, EXTENT_BYTES // itemsize))
    starts = accumulate((view.numel() * itemsize for view in views), initial=0)
    return [Extent(tensor, start, view) for start, view in zip(starts, views, strict=False)]


def _split(view: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Cut a view into views of ``limit`` elements at most, in row-major order."""
    if view.is_contiguous():
        yield from view.view(-1).split(limit)
    elif num_rows := limit * view.shape[0] // view.numel():
        yield from view.split(num_rows)
    else:  # one row alone may still be too long
        for row in view:
            yield from _split(row, limit)


def stored_dtype(tensor: TensorInfo) -> torch.dtype:
    """Return the type that a tensor is stored in; raises CheckpointError if torch lacks it."""
    dtype = getattr(torch, TORCH_NAMES.get(tensor.dtype, ""), None)
    if dtype is None or tensor.dtype == "F4":  # torch packs two of them into one element
        raise refuse(f"{tensor.name} is stored as {tensor.dtype}, which torch has no type for")
    return dtype


class Reader:
    """Brings extents to their place, one at a time: for one thread.

    Extents that go to host memory as they are stored are read straight to their place. The rest
    goes through a buffer of EXTENT_BYTES. Copies to a CUDA device run on a stream of the reader's
    own, so that another reader's next read overlaps them.
    """

    def __init__(self, shards: Shards, devices: Collection[torch.device]) -> None:
        """Set the buffer aside (untouched pages take no memory); raises MemoryLimitError.

        ``devices`` are the CUDA devices of the destinations. Its stream on each begins after the
        work that is queued on the current stream. That work may still read the memory that the
        destinations were given.
        """
        self._shards = shards
        self._block = HostBlock(EXTENT_BYTES, pin=bool(devices))
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        # of the device that the buffer was last copied to, by which an event is recorded
        self._copied: torch.cuda.Event | None = None

    def read(self, extent: Extent) -> None:
        """Fill the extent's view, or queue the copy that does; raises CheckpointError."""
        dtype = stored_dtype(extent.tensor)
        view = extent.view
        if view.device.type == "cpu" and view.dtype == dtype and view.is_contiguous():
            self._shards.read(extent.tensor, extent.start, bytes_of(view))
            return
        if self._copied is not None:
            self._copied.synchronize()
        buffer = self._block.tensor[: extent.nbytes]
        self._shards.read(extent.tensor, extent.start, bytes_of(buffer))
        stream = self._streams.get(view.device)
        with torch.cuda.stream(stream):
            view.copy_(buffer.view(dtype).view(view.shape), non_blocking=True)
        self._copied = stream.record_event() if stream is not None else None

    def close(self) -> None:
        """Wait for the copies and give the buffer back."""
        for stream in self._streams.values():
            stream.synchronize()
        self._block.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
