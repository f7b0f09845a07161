"""The header of one safetensors file: its length, its JSON, and the tensors it describes.

Source: the format as safetensors 0.8 validates it (``SafeTensors::read_metadata``,
``Metadata::validate``): 8 bytes little-endian length, JSON, then tensors without overlap or hole.
"""

from typing import Any

from offplan.checkpoint.jsontext import load_object, quote
from offplan.checkpoint.tensors import DTYPE_BITS, TensorInfo
from offplan.errors import CheckpointError

LENGTH_BYTES = 8
"""Bytes of the number before the JSON, which is its length."""
MAX_HEADER_BYTES = 100_000_000
"""Bytes of the longest JSON that safetensors accepts."""
_MAX_NAME_LENGTH = 1024
"""Characters of the longest name, far past any model's; the format itself sets no limit."""
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
"""Keys that describe a tensor. safetensors skips other keys, unless what they hold is nested too
deeply or a number out of its range."""
_AGAIN = "the file is damaged or cut short: fetch it again"


def header_length(first: bytes, file_bytes: int | None, where: str) -> int:
    """Read the length of the JSON from a file's first 8 bytes.

    ``file_bytes`` is the size of the whole file where it is known. Raises CheckpointError, naming
    ``where``, when the length cannot be right.
    """
    if len(first) < LENGTH_BYTES:
        expected = "a safetensors file (8 bytes of header length at least)"
        raise _damaged(where, f"{len(first)} bytes", expected)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if first.startswith(b"version "):
        raise CheckpointError(
            f"{where}: found a Git LFS pointer, expected the safetensors file it stands for; "
            "run `git lfs pull` in the checkpoint's folder"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: found a header of {length} bytes, expected {MAX_HEADER_BYTES} at most; "
            "this is not a safetensors file, or it is damaged"
        )
    if file_bytes is not None and LENGTH_BYTES + length > file_bytes:
        expected = f"a header of {length} bytes in it"
        raise _damaged(where, f"a file of {file_bytes} bytes", expected)
    return length


def parse_header(header: bytes, file_bytes: int | None, shard: str, where: str) -> list[TensorInfo]:
    """Read and validate a header's JSON (the bytes after the length), in the order of the file.

    ``shard`` is recorded in the tensors. ``file_bytes`` is the size of the whole file, None if it
    is not known (then missing data cannot be noticed). Raises CheckpointError, naming ``where``.
    """
    # Writers may pad the JSON on either side, to align the data.
    if not header.lstrip(b" \t\r\n").startswith(b"{"):
        raise CheckpointError(
            f"{where}: the header starts with {quote(header[:8])}, expected a JSON object; "
            "this is not a safetensors file, or it is damaged"
        )
    entries = load_object(header, where, _parse_int)
    metadata = entries.pop("__metadata__", None)
    _check_metadata({} if metadata is None else metadata, where)
    start_of_data = LENGTH_BYTES + len(header)
    tensors = [
        _parse_entry(name, entry, shard, start_of_data, where) for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = start_of_data
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the tensor" if tensor.offset < end else "leaves a hole"
            raise CheckpointError(
                f"{where}: tensor {quote(tensor.name)} starts at byte {tensor.offset} and "
                f"{problem} before it, expected {end}; {_AGAIN}"
            )
        end += tensor.nbytes
    if file_bytes is not None and end != file_bytes:
        raise _damaged(where, f"a file of {file_bytes} bytes", f"{end} (header and tensors)")
    return tensors


def _parse_int(text: str) -> int | float:
    """Read a whole number as safetensors does, to which ``-0`` is a fraction."""
    return float(text) if text == "-0" else int(text)


def _damaged(where: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{where}: found {found}, expected {expected}; {_AGAIN}")


def _check_metadata(metadata: Any, where: str) -> None:
    try:
        "".join([*metadata, *metadata.values()]).encode("utf-8")
    # what is no mapping, texts or Unicode: JSON escapes allow lone surrogates
    except (AttributeError, TypeError, UnicodeError):
        raise _damaged(where, f"{quote(metadata)} as __metadata__", "texts by name") from None


def _parse_entry(name: str, entry: Any, shard: str, start_of_data: int, where: str) -> TensorInfo:
    at = f"{where}: tensor {quote(name)}"
    # A name ends in reports: it must not be able to steer a terminal.
    if not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
        raise CheckpointError(
            f"{at}: found a name of {len(name)} characters, expected printable text of "
            f"{_MAX_NAME_LENGTH} at most; the file is damaged, or not to be trusted"
        )
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _damaged(at, quote(entry), "dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{at}: found dtype {quote(dtype)}, expected one of {', '.join(DTYPE_BITS)}; "
            "the file is damaged, or newer than this version of offplan"
        )
    if not _is_counts(shape):
        raise _damaged(at, f"shape {quote(shape)}", "whole numbers")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "[first, last] with first <= last"
        raise _damaged(at, f"data_offsets {quote(offsets)}", expected)
    first, last = offsets
    if _count_bits(shape, dtype) != 8 * (last - first):
        expected = f"what {dtype} {quote(shape)} takes"
        raise _damaged(at, f"{last - first} bytes", expected)
    return TensorInfo(name, dtype, tuple(shape), shard, start_of_data + first)


def _count_bits(shape: list[int], dtype: str) -> int | None:
    """Multiply out, or return None past 64 bits: a long shape must not cost time."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= 2**64:
            return None
    return bits


def _is_counts(value: object) -> bool:
    """Return True for a list of numbers that an unsigned 64-bit integer holds."""
    # type(), not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**64 for n in value)
