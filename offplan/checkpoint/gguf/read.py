"""The way from GGUF files to the config and the model of their shape, sized as safetensors."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offplan.checkpoint.config_only import size_config
from offplan.checkpoint.gguf.origin import GGUF
from offplan.checkpoint.gguf.places import Found
from offplan.checkpoint.jsontext import describe, quote, shorten
from offplan.checkpoint.model import Model
from offplan.checkpoint.requantise import requantise
from offplan.errors import CheckpointError
from offplan.files import load_facts
from offplan.progress import Progress

if TYPE_CHECKING:
    from offplan.checkpoint.gguf.reader import TensorHead


_TABLE: dict[str, Any] = load_facts(Path(__file__).with_name("architectures.yaml"))
COMMON: dict[str, str] = _TABLE["common"]
"""Keys of configs by those of GGUF, which follow the architecture's name."""
ARCHITECTURES: dict[str, dict[str, Any]] = _TABLE["architectures"]
_BLOCK = re.compile(r"blk\.(\d+)\.")
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that llama.cpp makes of a config's values."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the stored tensors by name, the fastest dimension first."""


def find_config(metadata: Mapping[str, Any], shapes: Shapes, types: set[str]) -> dict[str, Any]:
    """Return a config, without a type, of the same shape.

    ``types`` are ggml's names of the stored types. Raises CheckpointError for an architecture that
    is not in the table, and for values that differ by layer where the table has one.
    """
    values = of_architecture(metadata)
    name = _name(metadata, values, shapes)
    if name not in ARCHITECTURES:
        raise CheckpointError("offplan does not know its architecture's shape")
    entry = ARCHITECTURES[name]
    # an embedding's rows are the vocabulary, which few files count otherwise
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError("it has no embedding of tokens")
    config = {
        "model_type": entry["model_type"],
        "vocab_size": embedding[1],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        **entry.get("values", {}),
    }
    if name == "gemma4":
        config |= _read_gemma4(values, shapes)
    for key, named in {**COMMON, **entry.get("keys", {})}.items():
        if named is not None and key in values and config.get(named) is None:
            config[named] = _one(key, values[key])
    config["num_hidden_layers"] = num_layers(metadata)
    if name.startswith("deepseek"):
        config |= _read_heads(values)
    if name.startswith("qwen3") and values.get("ssm.time_step_rank"):
        config["linear_value_head_dim"] = values["ssm.inner_size"] // values["ssm.time_step_rank"]
    if name == "glm4moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in shapes
    if name == "gpt-oss" and "MXFP4" in types:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config


def of_architecture(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an architecture, without its name before their keys."""
    prefix = f"{metadata.get('general.architecture')}."
    return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}


def num_layers(metadata: Mapping[str, Any]) -> int | None:
    """Return the decoder layers, without those that predict further tokens; None if not told."""
    values = of_architecture(metadata)
    count, more = values.get("block_count"), values.get("nextn_predict_layers", 0)
    if not isinstance(count, int) or not isinstance(more, int):
        return None
    return count - more


def is_counted(name: str, last: int | None, shapes: Shapes) -> bool:
    """Return True if a tensor is a weight of the model's ``last`` layers, or outside them."""
    block = _BLOCK.match(name)
    if name in _DERIVED or (block is not None and last is not None and int(block[1]) >= last):
        return False
    # halves of this matrix, beside it in older files
    halves = (".attn_k_b.weight", ".attn_v_b.weight")
    whole = f"{name.rpartition('.attn_')[0]}.attn_kv_b.weight"
    return not (name.endswith(halves) and whole in shapes)


def _name(metadata: Mapping[str, Any], values: Mapping[str, Any], shapes: Shapes) -> str:
    """Return the table's name of an architecture: llama.cpp's covers two of them now and then."""
    name = str(metadata.get("general.architecture"))
    if name == "llama" and values.get("expert_count"):
        return "mixtral"
    if name == "deepseek2" and any("exp_probs_b" in each for each in shapes):
        return "deepseek3"
    return name


def _one(key: str, value: Any) -> Any:
    """Return a value that all layers have; raises CheckpointError for one that differs."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise CheckpointError(f"its {quote(key)} differs by layer, which offplan does not read")
    return value[0]


def _read_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the heads of latent attention, which older files state as plain heads."""
    rope = values.get("rope.dimension_count", 0)
    key = values.get("attention.key_length_mla", values.get("attention.key_length", rope))
    heads = {
        "num_key_value_heads": values.get("attention.head_count"),
        "qk_nope_head_dim": key - rope,
    }
    if "attention.value_length_mla" not in values:
        heads["v_head_dim"] = values.get("attention.value_length")
    return heads


def _read_gemma4(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Read what differs between Gemma 4's layers with a window and those without."""
    is_local = values.get("attention.sliding_window_pattern")
    if not isinstance(is_local, list) or all(is_local) or not any(is_local):
        raise CheckpointError("it does not say which layers have a sliding window")
    widths, heads = values.get("feed_forward_length"), values.get("attention.head_count_kv")
    config: dict[str, Any] = {
        "layer_types": [("full", "sliding")[bool(each)] + "_attention" for each in is_local],
        "attention_k_eq_v": f"blk.{is_local.index(False)}.attn_v.weight" not in shapes,
        "enable_moe_block": bool(values.get("expert_count")),
    }
    if isinstance(widths, list):
        config |= {"intermediate_size": min(widths), "use_double_wide_mlp": len({*widths}) > 1}
    if isinstance(heads, list) and len(heads) == len(is_local):
        config["num_key_value_heads"] = heads[is_local.index(True)]
        config["num_global_key_value_heads"] = heads[is_local.index(False)]
    return config


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
_FORMS = {8: "FP8 (blocks of 128 x 128)", 4: "4 bits (in groups)"}
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
            "in a clone of offplan, pip install '.[gguf]', or what installed offplan (uv tool, "
            "pipx) again with '.[serve,gguf]'. offplan runs safetensors, not GGUF: name a "
            "safetensors checkpoint of the model, or run the file with llama.cpp, Ollama or LM "
            "Studio"
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
