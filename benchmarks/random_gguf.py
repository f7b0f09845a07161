"""Write a GGUF file of a published model's shape, with random weights, for llama.cpp.

    python -m benchmarks.random_gguf CONFIG_JSON FILE --type q8_0|q4_0|bf16

Knows gpt-oss (whose experts stay MXFP4), Qwen3, Qwen3-MoE and GLM-4.5. Prints JSON: the
file's bytes. Each layer has the same blocks of weights, but a router of its own.
Source: llama.cpp, src/models/{openai-moe,qwen3,qwen3moe,glm4-moe}.cpp.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
}
TYPES = {name.lower(): gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "BF16")}
F32, MXFP4 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.MXFP4
SPREAD = 0.02
"""Standard deviation of weights."""
ROWS = 64
"""Rows of random weights, which repeat within a matrix."""

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def list_tensors(config: dict[str, Any]) -> Tensors:
    """Yield each tensor's name and its shape, rows before columns."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    kv_heads, kind = config["num_key_value_heads"], config["model_type"]
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    if not config.get("tie_word_embeddings"):
        yield "output.weight", (config["vocab_size"], width)
    after = "ffn_norm" if kind in ("qwen3", "qwen3_moe") else "post_attention_norm"
    for layer in range(config["num_hidden_layers"]):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (width,)
        yield f"{at}{after}.weight", (width,)
        for name, rows in (("q", heads * size), ("k", kv_heads * size), ("v", kv_heads * size)):
            yield f"{at}attn_{name}.weight", (rows, width)
            if config.get("attention_bias"):
                yield f"{at}attn_{name}.bias", (rows,)
        yield f"{at}attn_output.weight", (width, heads * size)
        if kind == "gpt_oss":
            yield f"{at}attn_output.bias", (width,)
            yield f"{at}attn_sinks.weight", (heads,)
        if kind in ("qwen3", "qwen3_moe"):
            yield f"{at}attn_q_norm.weight", (size,)
            yield f"{at}attn_k_norm.weight", (size,)
        yield from ((at + name, shape) for name, shape in list_mlp(config, layer))


def list_mlp(config: dict[str, Any], layer: int) -> Tensors:
    """Yield the tensors behind a layer's attention."""
    width = config["hidden_size"]
    experts = config.get("num_local_experts") or config.get("num_experts")
    experts = experts or config.get("n_routed_experts")
    if not experts or layer < config.get("first_k_dense_replace", 0):
        yield from list_projections("", (), width, config["intermediate_size"])
        return
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield "ffn_gate_inp.weight", (experts, width)
    yield from list_projections("_exps", (experts,), width, inner)
    if config["model_type"] == "gpt_oss":
        yield "ffn_gate_inp.bias", (experts,)
        for name, rows in (("gate", inner), ("up", inner), ("down", width)):
            yield f"ffn_{name}_exps.bias", (experts, rows)
    if config["model_type"] == "glm4_moe":
        yield "exp_probs_b.bias", (experts,)
        yield from list_projections("_shexp", (), width, inner * config["n_shared_experts"])


def list_projections(kind: str, before: tuple[int, ...], width: int, inner: int) -> Tensors:
    """Yield gate, up and down."""
    for name in ("gate", "up"):
        yield f"ffn_{name}{kind}.weight", (*before, inner, width)
    yield f"ffn_down{kind}.weight", (*before, width, inner)


def list_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp reads beside tensors, by names without the architecture."""
    heads, experts = config["num_attention_heads"], config.get("num_local_experts")
    experts = experts or config.get("num_experts") or config.get("n_routed_experts")
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": int(size * config.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(config.get("rope_theta") or rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if experts:
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        values |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": inner,
        }
    if config["model_type"] == "gpt_oss":
        values["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "glm4_moe":
        values |= {
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": bool(config["norm_topk_prob"]),
        }
    return values


class Weights:
    """Makes random weights of each shape once."""

    def __init__(self, stored: gguf.GGMLQuantizationType, experts: gguf.GGMLQuantizationType):
        self._stored, self._experts = stored, experts
        self._made: dict[tuple[Any, ...], np.ndarray] = {}
        self._random = np.random.default_rng(0)

    def find_type(self, name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        """Return the type that a tensor is stored in."""
        if len(shape) == 1 or name.endswith(".bias") or "ffn_gate_inp" in name:
            return F32
        return self._experts if "_exps" in name else self._stored

    def make(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor's bytes, uint8, or its float32 values."""
        kind = self.find_type(name, shape)
        if kind is F32:
            near = 1.0 if "norm" in name else 0.0
            return self._random.normal(near, SPREAD, shape).astype(np.float32)
        key = shape, kind
        if key not in self._made:
            some = self._random.normal(0, SPREAD, (ROWS, shape[-1])).astype(np.float32)
            block = gguf.quants.quantize(some, kind).view(np.uint8)
            num_rows = int(np.prod(shape[:-1]))
            copies = -(-num_rows // ROWS)
            whole = np.tile(block, (copies, 1))[:num_rows]
            self._made[key] = whole.reshape(*shape[:-1], block.shape[-1])
        return self._made[key]


def write(config: dict[str, Any], path: Path, stored: gguf.GGMLQuantizationType) -> None:
    """Write the file."""
    architecture = ARCHITECTURES[config["model_type"]]
    weights = Weights(stored, MXFP4 if config["model_type"] == "gpt_oss" else stored)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in list_values(config).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    tensors = list(list_tensors(config))
    for name, shape in tensors:
        kind = weights.find_type(name, shape)
        stored_shape = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        dtype = np.dtype(np.float32 if kind is F32 else np.uint8)
        sizes = shape if kind is F32 else stored_shape
        num_bytes = int(np.prod(sizes)) * dtype.itemsize
        writer.add_tensor_info(name, sizes, dtype, num_bytes, None if kind is F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors:
        writer.write_tensor_data(weights.make(name, shape))
    writer.close()


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="q8_0")
    args = parser.parse_args()
    config = json.loads(args.config.read_text("utf-8"))
    write(config, args.file, TYPES[args.type])
    print(json.dumps({"file": str(args.file), "bytes": args.file.stat().st_size}))


if __name__ == "__main__":
    main()
