"""Writes small GGUF files with the gguf package's own writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

BASE = "meta-llama/Llama-3.2-1B"
Q4 = gguf.GGMLQuantizationType.Q4_K
WIDTH, VOCABULARY = 256, 512
"""Rows of a Q4_K matrix are multiples of 256."""


def write_llama(path: Path, num_experts: int = 0, **options: Any) -> Path:
    """Write a model of two layers, with experts one of Mixtral's shape."""
    layer = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (WIDTH, WIDTH),
        "attn_k.weight": (WIDTH // 2, WIDTH),
        "attn_v.weight": (WIDTH // 2, WIDTH),
        "attn_output.weight": (WIDTH, WIDTH),
        "ffn_norm.weight": (WIDTH,),
    }
    part, experts = ("_exps", (num_experts,)) if num_experts else ("", ())
    layer |= {f"ffn_{name}{part}.weight": (*experts, 512, WIDTH) for name in ("gate", "up")}
    layer[f"ffn_down{part}.weight"] = (*experts, WIDTH, 512)
    if num_experts:
        layer["ffn_gate_inp.weight"] = (num_experts, WIDTH)
    values = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 64,
    }
    if num_experts:
        values |= {"expert_count": num_experts, "expert_used_count": 2}
    return write(path, "llama", values, layer, **options)


def write(
    path: Path,
    architecture: str,
    values: dict[str, Any],
    layer: dict[str, tuple[int, ...]],
    *,
    stored: gguf.GGMLQuantizationType | None = Q4,
    file_type: int | None = 15,
    base: str | None = f"https://huggingface.co/{BASE}",
    name: str = "Tiny",
    num_shards: int = 1,
    num_tokens: int = VOCABULARY,
    head: bool = True,
    **texts: str,
) -> Path:
    """Write a file, or the shards of one, whose matrices are zeros; ``stored`` None is float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if head:
        tensors["output.weight"] = (VOCABULARY, WIDTH)
    for index in range(values.get("block_count", 0)):
        tensors |= {f"blk.{index}.{each}": shape for each, shape in layer.items()}
    writer = gguf.GGUFWriter(
        path,
        architecture,
        split_max_tensors=-(-len(tensors) // num_shards) if num_shards > 1 else 0,
    )
    writer.add_name(name)
    if file_type is not None:
        writer.add_file_type(file_type)
    if base is not None:
        writer.add_base_model_count(1)
        writer.add_base_model_repo_url(0, base)
    for key, value in texts.items():
        writer.add_string(f"general.{key}", value)
    for key, value in values.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_token_list([f"token {index}" for index in range(num_tokens)])
    writer.add_token_types([1] * num_tokens)
    for each, shape in tensors.items():
        if len(shape) == 1 or stored is None:
            writer.add_tensor(each, np.zeros(shape, np.float32))
            continue
        stored_shape = gguf.quants.quant_shape_to_byte_shape(shape, stored)
        writer.add_tensor(each, np.zeros(stored_shape, np.uint8), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
