"""The reader of GGUF headers: the gguf package's, held to the header and to bounded memory."""

import math
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

from offplan.errors import CheckpointError

MAX_HEADER_BYTES = 256 * 2**20
"""Most bytes before a file's weights, past any file's: a vocabulary takes some 10 MB."""
_MOST_KEYS, _MOST_TENSORS = 2**14, 2**14
"""Past any file's, which has all experts of a layer in one tensor; the reader makes some objects of
each."""
_MOST_ITEMS = 1_000
"""Longest array of numbers that is read: one a layer. The reader steps over arrays of texts."""
_MOST_ELEMENTS = 2**48
_MOST_DIMENSIONS = 8


class Cut(CheckpointError):
    """The bytes end within the header."""


class TensorHead(NamedTuple):
    """A tensor's name, shape and type; never its values."""

    name: str
    shape: tuple[int, ...]
    """As in the file: the fastest dimension first."""
    type: str
    """ggml's name of the stored type: ``Q4_K``."""
    num_elements: int
    nbytes: int
    """Bytes as stored."""
    end: int
    """First byte of the file after it."""


class HeaderReader(gguf.GGUFReader):  # type: ignore[misc]
    """gguf's reader, which maps the file, without what it makes of weights and vocabularies.

    It takes 16 s and 500 MB for the 150,000 names of a vocabulary. Source: gguf 0.19.
    """

    heads: tuple[TensorHead, ...] = ()

    def list_values(self) -> dict[str, Any]:
        """Return the metadata that was read: numbers, texts and short arrays of numbers."""
        return {
            name: _value(field)
            for name, field in self.fields.items()
            if field.types and (field.types[0] != gguf.GGUFValueType.ARRAY or field.data)
        }

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > MAX_HEADER_BYTES:
            raise ValueError(f"it takes more than {MAX_HEADER_BYTES} bytes")
        if end > len(self.data):
            raise Cut
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if gguf.GGUFValueType(int(raw_type)) != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count = gguf.GGUFValueType(int(item[0])), int(length[0])
        start, types = orig_offs + 12, [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.ARRAY:
            raise ValueError("it has arrays of arrays")
        if kind == gguf.GGUFValueType.STRING:
            return self._step_over(start, count) - orig_offs, [item, length], [], types
        # in one piece: the package makes an object of each number, and of 16 MB of them 8 GB
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        data = [2] if 0 < count <= _MOST_ITEMS else []
        return 12 + int(values.nbytes), [item, length, values], data, types

    def _step_over(self, start: int, count: int) -> int:
        """Return where so many texts end."""
        length = struct.Struct(">Q" if self.endianess == gguf.GGUFEndian.BIG else "<Q")
        end, last = start, min(len(self.data), MAX_HEADER_BYTES) - length.size
        for _ in range(count):
            if end > last:
                self._get(end, np.uint64)
            end += length.size + length.unpack_from(self.data, end)[0]
        self._get(start, np.uint8, end - start)
        return end

    def _build_fields(self, offs: int, count: int) -> int:
        _limit("keys", count, _MOST_KEYS)
        return int(super()._build_fields(offs, count))

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        _limit("tensors", count, _MOST_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        self.heads = tuple(_read_head(start_offs, *field.parts[1:]) for field in fields)


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"it has {count} {what}, expected {most} at most")


def _read_head(start: int, name: Any, _: Any, dims: Any, raw_type: Any, offset: Any) -> TensorHead:
    _limit("dimensions of a tensor", len(dims), _MOST_DIMENSIONS)
    shape = tuple(map(int, dims))
    num_elements = math.prod(shape)
    _limit("elements of a tensor", num_elements, _MOST_ELEMENTS)
    kind = gguf.GGMLQuantizationType(int(raw_type[0]))
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    nbytes = num_elements // block_elements * block_bytes
    told = bytes(name).decode("utf-8")
    return TensorHead(told, shape, kind.name, num_elements, nbytes, start + int(offset[0]) + nbytes)


def _value(field: Any) -> Any:
    """Return a field's value; texts that are no UTF-8 with marks in place of what is none."""
    kind, *items = field.types
    (at,) = field.data
    if kind == gguf.GGUFValueType.STRING:
        return bytes(field.parts[at]).decode("utf-8", "replace")
    values = field.parts[at].tolist()
    return values if items else values[0]


def name_file_type(number: Any) -> str | None:
    """Return the name of a file's quantisation, ``Q4_K_M``, None for a number that has none."""
    try:
        name: str = gguf.LlamaFileType(number).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
