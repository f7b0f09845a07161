"""The way from GGUF files to the model of their shape, sized as a safetensors checkpoint."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offplan.checkpoint.config_only import size_config
from offplan.checkpoint.gguf.origin import GGUF
from offplan.checkpoint.gguf.places import Found
from offplan.checkpoint.gguf.shape import find_config, is_counted, num_layers
from offplan.checkpoint.jsontext import describe, quote, shorten
from offplan.checkpoint.model import Model
from offplan.checkpoint.requantise import requantise
from offplan.errors import CheckpointError
from offplan.progress import Progress

if TYPE_CHECKING:
    from offplan.checkpoint.gguf.reader import TensorHead

_REPO = re.compile(
    r"(https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+?)/?", re.ASCII
)
_NAMES_SOURCE = re.compile(
    r"general\.(?:source(?:\.huggingface)?|base_model\.\d+)\.(?:repo_url|url|repository)"
)
_TOLERANCE = 0.005
"""Share of the weights by which a file may differ from its metadata's shape. llama.cpp adds tables,
and cuts or fills up rows of a vocabulary. Source: chosen."""
_MOST_NAME = 80
_FORMS = {8: "FP8 (blocks of 128 x 128)", 4: "4 bits (groups of 128)"}
"""The form in which ``requantise`` stores linear layers."""


class Header(NamedTuple):
    """The header of a file, or of all shards of one: what stands before the weights."""

    metadata: dict[str, Any]
    """Numbers, texts and short arrays by their keys."""
    tensors: tuple["TensorHead", ...]
    num_bytes: int = 0
    """Bytes before the weights, of one file's."""


def read_gguf(found: Found, on_progress: Progress, dtype: str | None = None) -> Model:
    """Read what GGUF files state and return the model of their shape, as safetensors have it.

    ``dtype`` is the type that it is sized in. It is the form that comes nearest to the file's bits
    if left out. ``on_progress`` is that of ``size_config``. Raises CheckpointError, which states
    what the file is, where there is no such checkpoint.
    """
    headers = [read_header(path, str(path)) for path in found.files]
    return size_headers(headers, found, on_progress, dtype)


def size_headers(
    headers: Sequence[Header], found: Found, on_progress: Progress, dtype: str | None = None
) -> Model:
    """Do what ``read_gguf`` does for the headers of all shards, which were read."""
    header = Header(headers[0].metadata, tuple(t for each in headers for t in each.tensors))
    where, gguf = str(found.files[0]), describe_gguf(header, found.runs_with)
    if header.metadata.get("general.type") == "mmproj" or gguf.architecture == "clip":
        raise CheckpointError(
            f"{where}: found the part of a model that reads images or sound (mmproj), expected the "
            "model's own GGUF file; name that one"
        )
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    try:
        config = find_config(header.metadata, shapes, {t.type for t in header.tensors})
        sized = size_config({**config, "dtype": dtype or "bfloat16"}, where, on_progress)
    except CheckpointError as error:
        why = str(error).removeprefix(f"{where}: ").partition("; correct")[0]
        raise _refuse(where, gguf, why) from None
    # what numbers and lists raise that are not what the architecture's files have
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise _refuse(where, gguf, "its metadata contradict themselves") from None
    return _as_stored(sized, gguf, dtype)


def read_header(path: Path, where: str, file_bytes: int | None = None) -> Header:
    """Read a file's header and nothing after it.

    ``path`` has the file, or its first bytes where ``file_bytes`` is the whole one's size. Raises
    CheckpointError, which names the file as ``where``, and the reader's Cut where the bytes end
    within the header.
    """
    reader = import_reader(where)
    try:
        read = reader.HeaderReader(path)
        header = Header(read.list_values(), read.heads, int(read.data_offset))
        file_bytes = file_bytes or path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{where}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except reader.Cut:
        raise reader.Cut(
            f"{where}: found the start of a GGUF file, which ends within its header; finish the "
            "download"
        ) from None
    # The package raises what its lists and numbers do, of whatever a damaged file has.
    except Exception as error:
        raise CheckpointError(
            f"{where}: its GGUF header cannot be read ({describe(error)}); fetch the file "
            "again, or update the gguf package"
        ) from None
    if (end := max((tensor.end for tensor in header.tensors), default=0)) > file_bytes:
        raise CheckpointError(
            f"{where}: found {file_bytes} bytes, expected {end} by its header; finish the download"
        )
    return header


def describe_gguf(header: Header, runs_with: tuple[str, ...]) -> GGUF:
    """Describe what a header states."""
    from offplan.checkpoint.gguf.reader import name_file_type

    metadata, tensors = header.metadata, header.tensors
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    last = num_layers(metadata)
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.type] += tensor.nbytes
    most = max(sorted(num_bytes), key=num_bytes.__getitem__, default="no type")
    return GGUF(
        architecture=_plain(metadata.get("general.architecture")) or "no architecture",
        name=_plain(metadata.get("general.name")),
        file_type=name_file_type(metadata.get("general.file_type")) or most,
        num_parameters=sum(t.num_elements for t in tensors if is_counted(t.name, last, shapes)),
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        num_layers=last,
        runs_with=runs_with,
        bases=tuple(_list_bases(metadata)),
    )


def _as_stored(model: Model, gguf: GGUF, dtype: str | None) -> Model:
    """Return the model as the safetensors checkpoint that comes nearest to a file's bits.

    In floats where a ``dtype`` was named. Raises CheckpointError where the shape has other weights
    than the file.
    """
    difference = model.num_parameters - gguf.num_parameters
    if abs(difference) > _TOLERANCE * gguf.num_parameters:
        told = f"its metadata describe {model.num_parameters:,} parameters, not those it has"
        raise _refuse(model.source, gguf, told)
    bits = min((16, 8, 4), key=lambda each: abs(each - gguf.bits))
    fewer = requantise(model, bits) if bits < 16 and dtype is None else None
    planned = fewer or model
    form = _FORMS[bits] if fewer is not None else planned.dtype
    if model.architecture.quantisation is not None:
        form = model.architecture.quantisation.method
    notes = ("sizes come from a GGUF file's metadata: no safetensors were seen", *planned.notes)
    return replace(planned, notes=notes, gguf=replace(gguf, planned_in=form))


def import_reader(where: str) -> Any:
    """Import what reads headers; raises CheckpointError where the gguf package is not installed."""
    try:
        from offplan.checkpoint.gguf import reader
    except ImportError:
        raise CheckpointError(
            f"{where}: a GGUF file's header is read by the package gguf, which is not installed: "
            "in a clone of offplan, pip install '.[gguf]'. offplan runs safetensors, not GGUF: "
            "name a safetensors checkpoint of the model, or run the file with llama.cpp, Ollama or "
            "LM Studio"
        ) from None
    return reader


def _list_bases(metadata: dict[str, Any]) -> Sequence[str]:
    """List the Hub's models that the metadata name."""
    found: dict[str, None] = {}
    for key in sorted(metadata, key=lambda key: (not key.startswith("general.source"), key)):
        value = metadata[key]
        if not isinstance(value, str) or not _NAMES_SOURCE.fullmatch(key):
            continue
        repo = _REPO.fullmatch(value)
        if repo is None or not (repo[1] or key.endswith("repository")):
            continue
        if not repo[2].lower().endswith("gguf"):
            found[repo[2]] = None
    return [*found][:2]


def _plain(value: Any) -> str | None:
    """Return a text of the file's that is fit to be shown."""
    if not isinstance(value, str) or not value:
        return None
    return shorten(value, _MOST_NAME) if value.isprintable() else quote(value)


def _refuse(where: str, gguf: GGUF, why: str) -> CheckpointError:
    """Make the error that states what a file is and why its shape cannot be planned."""
    return CheckpointError(
        f"{where}: {gguf.facts}. Its shape cannot be planned: {why}. {gguf.remedy}"
    )
