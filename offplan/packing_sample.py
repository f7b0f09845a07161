"""A few rows of each matrix that a plan packs, read from local files: which will not pack."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path

import numpy as np

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError
from offplan.forms.form import Part
from offplan.forms.packed import packed_parts
from offplan.packing import is_packed, name_weights, pack_model
from offplan.plan import Packing

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
ESCAPE = 15
"""Binary orders below the largest weight that shares its base from which on a weight needs a patch.

Source: ``runtime.forms.reference.ESCAPE``, which needs torch.
"""


def find_unpackable(model: Model, packing: Packing | None) -> tuple[str, ...]:
    """Name the weights, as ``Unpacked`` does, whose sample has far more patches than room.

    Reads nothing for a model that lies in no local folder. Raises CheckpointError for files that
    cannot be read.
    """
    folder = Path(model.source)
    if packing is None or model.revision is not None or not folder.is_dir():
        return ()
    held = pack_model(model, packing)
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
                for tensor in _sampled(held)
                if tensor.shard is not None and _exceeds(open_shard(tensor.shard), tensor)
            }
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return name_weights(model, beyond)


def _sampled(model: Model) -> Iterator[TensorInfo]:
    """Yield the stored matrices that are looked at, one of several experts' where one holds all."""
    for parameter in filter(is_packed, model.loaded_parameters):
        tensors = parameter.unpacked
        for tensor in tensors[:: max(1, len(tensors) // NUM_EXPERTS)][:NUM_EXPERTS]:
            *stack, num_out, num_in = tensor.shape
            middle = tensor.offset + prod(stack) // 2 * num_out * num_in * 2
            yield tensor._replace(shape=(num_out, num_in), offset=middle)


def _exceeds(file: int, matrix: TensorInfo) -> bool:
    """Whether sampled rows have so many patches that those of the matrix have no room."""
    num_out, num_in = matrix.shape
    parts = packed_parts(matrix.shape)
    room = parts[Part.PATCHES][1][0] / (num_out * num_in)
    width = -(-num_in // parts[Part.BASE][1][1])
    num_patches = num_weights = 0
    for run in range(NUM_RUNS):
        first = (num_out - RUN_ROWS) * run // (NUM_RUNS - 1)
        data = os.pread(file, RUN_ROWS * num_in * 2, matrix.offset + first * num_in * 2)
        if len(data) < RUN_ROWS * num_in * 2:
            return False  # loading tells of a file that was cut short
        num_patches += _count_patches(np.frombuffer(data, "<u2").reshape(RUN_ROWS, num_in), width)
        num_weights += RUN_ROWS * num_in
    return num_patches > CERTAIN * room * num_weights + FEW


def _count_patches(bits: np.ndarray[tuple[int, int], np.dtype[np.uint16]], width: int) -> int:
    """Count patches of rows of bfloat16 bits of which every ``width`` inputs share a base."""
    exponents = (bits >> 7) & 0xFF
    starts = np.arange(0, bits.shape[1], width)
    base = np.maximum.reduceat(exponents, starts, axis=1).repeat(width, axis=1)
    is_far = base[:, : bits.shape[1]] >= exponents + ESCAPE
    return int(np.count_nonzero(is_far & ((bits & 0x7FFF) != 0)))
