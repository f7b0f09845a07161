"""A checkpoint before it is understood: its config, and its tensors as headers describe them."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_DTYPES = """
BOOL=bool F4=float4_e2m1fn_x2 F6_E2M3 F6_E3M2 U8=uint8 I8=int8 F8_E5M2=float8_e5m2
F8_E4M3=float8_e4m3fn F8_E5M2FNUZ=float8_e5m2fnuz F8_E4M3FNUZ=float8_e4m3fnuz
F8_E8M0=float8_e8m0fnu I16=int16 U16=uint16 F16=float16 BF16=bfloat16 I32=int32 U32=uint32
F32=float32 C64=complex64 F64=float64 I64=int64 U64=uint64
"""
_IN_TORCH = dict(pair.partition("=")[::2] for pair in _DTYPES.split())
TORCH_NAMES = {name: known for name, known in _IN_TORCH.items() if known}
"""Torch's names of the types that it has. Source: safetensors 0.8, ``safetensors.torch._TYPES``."""
DTYPE_BITS = {"BOOL": 8} | {
    name: int(found[1]) for name in _IN_TORCH if (found := re.match(r"[A-Z]+(\d+)", name))
}
"""Bits an element. Source: safetensors 0.8, ``Dtype::bitsize``."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored types that become the type that a model is computed in when they are loaded."""
FLOAT_BITS = {TORCH_NAMES[name]: DTYPE_BITS[name] for name in FLOATS}
"""Bits an element of these, as torch names them."""

INDEX = "(0|[1-9][0-9]{0,5})"
"""Matches the index of a layer or an expert as writers write it: no leading zero, few digits.

Anything else is a word: ``03`` must not stand for the same layer or expert as ``3``.
"""
_EXPERT_PART = re.compile(rf"(?:^|\.)experts\.{INDEX}\.")


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


Tensors = tuple[TensorInfo, ...]


def sum_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Sum up the bytes of tensors as stored, each type and shape worked out once."""
    counts = Counter((tensor.dtype, tensor.shape) for tensor in tensors)
    return sum(n * TensorInfo("", *each).nbytes for each, n in counts.items())


@dataclass(frozen=True)
class Stored:
    """A checkpoint as its source describes it."""

    config: Mapping[str, Any]
    """``config.json``, as read."""
    tensors: Tensors
    """All tensors, in no particular order."""
    revision: str | None = None
    """The Hub commit; None off the Hub."""
    generation: str | None = None
    """Fingerprint of the generation config, as a ``Model`` has it."""
    notes: tuple[str, ...] = ()
    """Sentences on what the source could not tell."""


def headers_sha256(tensors: Tensors) -> str:
    """SHA-256, in hex, over one sorted line a tensor: name, dtype, ``d0,d1,...``, tabs between.

    Shards, offsets and metadata are left out, so that the Hub, a folder sharded otherwise and a
    config alone agree.
    """
    kinds = {(tensor.dtype, tensor.shape) for tensor in tensors}
    ends = {each: f"\t{each[0]}\t{','.join(map(str, each[1]))}\n" for each in kinds}
    lines = sorted(tensor.name + ends[tensor.dtype, tensor.shape] for tensor in tensors)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def is_index(part: str) -> bool:
    """Return True if a name part is an index."""
    return re.fullmatch(INDEX, part) is not None


def split_expert(name: str) -> tuple[int, str] | None:
    """Part ``mlp.experts.3.up_proj.weight`` into 3 and ``mlp.experts.up_proj.weight``.

    It is None for a name without an expert's index.
    """
    found = _EXPERT_PART.search(name)
    return found and (int(found[1]), name[: found.start(1)] + name[found.end() :])
