"""Writes safetensors files and checkpoints, right and wrong, without any tensor library."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offplan.checkpoint.tensors import DTYPE_BITS

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

DENSE_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def header_bytes(header: Any) -> bytes:
    """Length and JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def entries(shapes: Shapes) -> tuple[dict[str, Any], int]:
    """A valid header's entries, one after the other, and the bytes of their data."""
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        num_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    return header, end


def safetensors_bytes(shapes: Shapes) -> bytes:
    header, num_bytes = entries(shapes)
    return header_bytes({"__metadata__": {"format": "pt"}, **header}) + bytes(num_bytes)


def write_sparse(path: Path, shapes: Shapes) -> None:
    """Write a file of the right size whose tensors take no room on disk."""
    header, num_bytes = entries(shapes)
    data = header_bytes(header)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + num_bytes)


def dense_shapes(num_layers: int = 2) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A small decoder with grouped-query attention."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (16, 8))
    }
    for index in range(num_layers):
        for name, shape in {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "mlp.up_proj": (12, 8),
        }.items():
            shapes[f"model.layers.{index}.{name}.weight"] = ("BF16", shape)
    shapes["lm_head.weight"] = ("BF16", (16, 8))
    return shapes


def write_folder(
    folder: Path, config: Mapping[str, Any], shards: Mapping[str, Shapes], index: Any = None
) -> Path:
    """Write a checkpoint; with more than one shard, or an ``index`` given, an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for shard, shapes in shards.items():
        (folder / shard).write_bytes(safetensors_bytes(shapes))
    if index is None and len(shards) > 1:
        index = {"weight_map": {name: s for s, shapes in shards.items() for name in shapes}}
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def split_in_two(shapes: Shapes) -> dict[str, Shapes]:
    """Two shards with every other tensor."""
    names = list(shapes)
    return {
        "model-00001-of-00002.safetensors": {name: shapes[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: shapes[name] for name in names[1::2]},
    }
