"""The header of one safetensors file: its length, its JSON, and the tensors it describes.

Source: the format as safetensors 0.8 validates it (``SafeTensors::read_metadata``,
``Metadata::validate``): 8 bytes little-endian length, JSON, then tensors without overlap or hole.
"""

from collections.abc import Mapping
from typing import Any

from offplan.checkpoint.jsontext import is_text, load_object, quote
from offplan.checkpoint.tensors import DTYPE_BITS, TensorInfo
from offplan.errors import CheckpointError

LENGTH_BYTES = 8
"""Bytes of the number before the JSON, which is its length."""
MAX_HEADER_BYTES = 100_000_000
"""Bytes of the longest JSON that safetensors accepts."""
_MAX_NAME_LENGTH = 1024
"""Characters of the longest name, far past any model's; the format itself sets no limit."""
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_AGAIN = "the file is damaged or cut short: fetch it again"


def header_length(first: bytes, file_bytes: int | None, where: str) -> int:
    """Read the length of the JSON from a file's first 8 bytes.

    ``file_bytes`` is the size of the whole file where it is known. Raises CheckpointError, naming
    ``where``, when the length cannot be right.
    """
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(
            f"{where}: found {len(first)} bytes, expected a safetensors file (8 bytes of header "
            f"length at least); {_AGAIN}"
        )
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
        raise CheckpointError(
            f"{where}: found a file of {file_bytes} bytes, expected a header of {length} bytes "
            f"in it; {_AGAIN}"
        )
    return length


def parse_header(header: bytes, file_bytes: int | None, shard: str, where: str) -> list[TensorInfo]:
    """Read and validate a header's JSON (the bytes after the length), in the order of the file.

    ``shard`` is recorded in the tensors; ``file_bytes`` is the size of the whole file, None when
    it is not known (then missing data cannot be noticed). Raises CheckpointError, naming
    ``where``.
    """
    # Writers may pad the JSON on either side, to align the data.
    if not header.lstrip(b" \t\r\n").startswith(b"{"):
        raise CheckpointError(
            f"{where}: the header starts with {quote(header[:8])}, expected a JSON object; "
            "this is not a safetensors file, or it is damaged"
        )
    entries = load_object(header, where)
    _check_metadata(entries.pop("__metadata__", None), where)
    spans = [_parse_entry(name, entry, where) for name, entry in entries.items()]
    spans.sort(key=lambda span: span[2:])
    start_of_data = LENGTH_BYTES + len(header)
    tensors = []
    end = 0
    for name, info, first, last in spans:
        if first != end:
            problem = "overlaps the tensor before it" if first < end else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: tensor {quote(name)} starts at byte {first} and {problem}, expected "
                f"{end}; {_AGAIN}"
            )
        end = last
        tensors.append(TensorInfo(name, info[0], info[1], shard, start_of_data + first))
    if file_bytes is not None and start_of_data + end != file_bytes:
        raise CheckpointError(
            f"{where}: found a file of {file_bytes} bytes, expected {start_of_data + end} "
            f"(header and tensors); {_AGAIN}"
        )
    return tensors


def _check_metadata(metadata: object, where: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(
        is_text(key) and is_text(value) for key, value in metadata.items()
    ):
        raise CheckpointError(
            f"{where}: found {quote(metadata)} as __metadata__, expected texts by name; {_AGAIN}"
        )


def _parse_entry(
    name: str, entry: object, where: str
) -> tuple[str, tuple[str, tuple[int, ...]], int, int]:
    """Check one tensor's entry; return its name, type and shape, and its span in the data."""
    at = f"{where}: tensor {quote(name)}"
    # A name ends in reports: it must not be able to steer a terminal.
    if not is_text(name) or not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
        raise CheckpointError(
            f"{at}: found a name of {len(name)} characters, expected printable text of "
            f"{_MAX_NAME_LENGTH} at most; the file is damaged, or not to be trusted"
        )
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY_KEYS:
        raise CheckpointError(
            f"{at}: found {quote(entry)}, expected dtype, shape and data_offsets; {_AGAIN}"
        )
    dtype = _parse_dtype(entry, at)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_counts(shape):
        raise CheckpointError(f"{at}: found shape {quote(shape)}, expected whole numbers; {_AGAIN}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{at}: found data_offsets {quote(offsets)}, expected [first, last] with first <= "
            f"last; {_AGAIN}"
        )
    first, last = offsets
    bits = _count_bits(shape, dtype)
    if bits is None or bits % 8 or last - first != bits // 8:
        raise CheckpointError(
            f"{at}: found {last - first} bytes, expected what {dtype} {quote(shape)} takes; "
            f"{_AGAIN}"
        )
    return name, (dtype, tuple(shape)), first, last


def _count_bits(shape: list[int], dtype: str) -> int | None:
    """Multiply out, or return None past 64 bits: a long shape must not cost time."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= 2**64:
            return None
    return bits


def _parse_dtype(entry: Mapping[str, Any], at: str) -> str:
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{at}: found dtype {quote(dtype)}, expected one of {', '.join(DTYPE_BITS)}; "
            "the file is damaged, or newer than this version of offplan"
        )
    return dtype


def _is_counts(value: object) -> bool:
    """Whether this is a list of numbers that an unsigned 64-bit integer holds."""
    # type(), not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**64 for n in value)
