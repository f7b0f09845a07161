"""The files of a checkpoint, open for reading: ranges of bytes into memory, and no page mapped."""

import os
from collections.abc import Iterable
from pathlib import Path

from offplan.checkpoint.folder import read_shard
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError


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
