"""A few rows of each matrix that a plan packs, read from local files: which will not pack."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offplan.capabilities.table import Recoding
from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError
from offplan.forms.form import BASE_BYTES, MOST_EXPONENT, patch_reserve
from offplan.held.held import hold
from offplan.held.packing import name_weights
from offplan.held.stage import Stage

NUM_RUNS, RUN_ROWS = 4, 4
"""Runs of rows that are read of a matrix, evenly apart, and rows of each.

Source: 16 rows of 4,096 weights have room for 128 patches, which a sample tells from 192 by five
standard deviations.
"""
NUM_EXPERTS = 2
"""Routed experts of a layer that are looked at, of each of their weights."""
CERTAIN = 1.5
"""Times the patches of a sample must exceed its share of the room before a matrix is given up.
Loading tries the others, and knows for certain."""
FEW = 16
"""Patches more than that share, besides: a single odd row is no proof."""


class Sample(NamedTuple):
    """What the rows show."""

    unpackable: tuple[str, ...] = ()
    """Weights, named as ``Unpacked`` does, whose rows have far more patches than room."""

    def advise(self) -> Iterator[str]:
        """Yield what to do about it, arguments in backquotes."""
        if self.unpackable:
            names = ",".join(self.unpackable)
            yield (
                f"A sample of the weights shows that {names} will not pack: `run` holds them as "
                f"stored or plans again; `leave_unpacked={names}` plans without packing them now."
            )


def take_sample(model: Model, recoding: Recoding | None) -> Sample:
    """Sample the weights that a plan recodes.

    Reads nothing for a model that lies in no local folder. Raises CheckpointError for files that
    cannot be read.
    """
    folder = Path(model.source)
    if recoding is None or model.revision is not None or not folder.is_dir():
        return Sample()
    stage = hold(model, recoding)
    with ExitStack() as stack:
        files: dict[str, int] = {}

        def open_shard(name: str) -> int:
            if name not in files:
                files[name] = os.open(folder / name, os.O_RDONLY)
                stack.callback(os.close, files[name])
            return files[name]

        try:
            beyond = {
                tensor.name
                for tensor in _sampled(stage)
                if tensor.shard is not None and _exceeds(open_shard(tensor.shard), tensor)
            }
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return Sample(name_weights(model, beyond))


def _sampled(stage: Stage) -> Iterator[TensorInfo]:
    """Yield the stored matrices that are looked at, one of several experts' where one holds all.

    Those that loading turns round have no rows to look at.
    """
    for parameter in stage.parameters:
        tensors = parameter.made_of
        for tensor in tensors[:: max(1, len(tensors) // NUM_EXPERTS)][:NUM_EXPERTS]:
            *stack, num_out, num_in = tensor.shape
            if parameter.shape[-2:] != (num_out, num_in):
                continue
            middle = tensor.offset + prod(stack) // 2 * num_out * num_in * 2
            yield tensor._replace(shape=(num_out, num_in), offset=middle)


def _exceeds(file: int, matrix: TensorInfo) -> bool:
    """Return True if sampled rows have so many patches that the matrix has no room for its own."""
    num_out, num_in = matrix.shape
    room = patch_reserve(num_out, num_in) / (num_out * num_in)
    num_patches = num_weights = 0
    for run in range(NUM_RUNS):
        first = (num_out - RUN_ROWS) * run // (NUM_RUNS - 1)
        data = os.pread(file, RUN_ROWS * num_in * 2, matrix.offset + first * num_in * 2)
        if len(data) < RUN_ROWS * num_in * 2:
            return False  # loading tells of a file that was cut short
        num_patches += _count_patches(np.frombuffer(data, "<u2").reshape(RUN_ROWS, num_in))
        num_weights += RUN_ROWS * num_in
    return num_patches > CERTAIN * room * num_weights + FEW


def _count_patches(bits: np.ndarray[tuple[int, int], np.dtype[np.uint16]]) -> int:
    """Count the patches of rows of bfloat16 bits, [rows, in], as ``runtime.forms.packing`` does."""
    num_rows, num_in = bits.shape
    exponents = ((bits >> 7) & 0xFF).astype(np.int16).reshape(num_rows, 2, num_in // 2)
    tops = np.where(exponents > MOST_EXPONENT, 0, exponents).max(1)
    starts = np.arange(0, num_in // 2, BASE_BYTES)
    bases = np.maximum(np.maximum.reduceat(tops, starts, axis=1), 15) - 15
    base = bases.repeat(BASE_BYTES, axis=1)[:, None, : num_in // 2]
    codes = exponents - base
    is_escape = ((codes < 1) | (codes > 15)) & ((codes != 0) | (base != 0))
    return int(np.count_nonzero(is_escape.reshape(bits.shape) & ((bits & 0x7FFF) != 0)))
