"""A checkpoint before it is understood: its config, and its tensors as headers describe them."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element. Source: safetensors 0.8, ``Dtype::bitsize``."""


class TensorInfo(NamedTuple):
    """A tensor's name, type, shape and place; never its values."""

    name: str
    dtype: str
    """Safetensors' name of the type, such as ``BF16``."""
    shape: tuple[int, ...]
    shard: str | None = None
    """File that holds it, relative to the checkpoint; None when known from a config alone."""
    offset: int = 0
    """First byte in that file, header included; 0 when known from a config alone."""

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.num_elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Stored:
    """A checkpoint as its source describes it."""

    config: Mapping[str, Any]
    """``config.json``, as read."""
    tensors: tuple[TensorInfo, ...]
    """All tensors, in no particular order."""
    revision: str | None = None
    """The Hub commit; None off the Hub."""
    notes: tuple[str, ...] = ()
    """Sentences on what the source could not tell."""


def headers_sha256(tensors: Iterable[TensorInfo]) -> str:
    """SHA-256, in hex, over one sorted line a tensor: name, dtype, ``d0,d1,...``, tabs between.

    Shards, offsets and metadata are left out, so that the Hub, a folder sharded otherwise and a
    config alone agree.
    """
    lines = sorted(
        f"{tensor.name}\t{tensor.dtype}\t{','.join(map(str, tensor.shape))}\n" for tensor in tensors
    )
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def is_index(part: str) -> bool:
    """Whether a name part is an index as writers write it: ASCII digits, no leading zero, few.

    Anything else is a word: ``03`` must not stand for the same layer or expert as ``3``.
    """
    return part.isascii() and part.isdecimal() and len(part) < 7 and (part[0] != "0" or part == "0")
