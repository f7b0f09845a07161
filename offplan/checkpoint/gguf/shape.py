"""The config that transformers would have for a GGUF file's shape."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offplan.checkpoint.jsontext import quote
from offplan.errors import CheckpointError
from offplan.files import load_facts

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
