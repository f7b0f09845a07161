"""Tiny checkpoints that store a layer which predicts further tokens, named as published ones are.

Source: the names of tensors of deepseek-ai/DeepSeek-V3 and zai-org/GLM-4.5.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.runtime.families import make_config, save_model
from tests.runtime.quantise import save_stored

FAMILIES = ("deepseek_v3", "glm4_moe")


def save_predicting(
    family: str, folder: Path, form: str | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """Save a tiny model whose last layer is its prediction layer; ``form`` stores it as codes."""
    if form is None:
        # GLM's class would keep a size that it does not have, and that tells of latents
        own = {"kv_lora_rank": None} if family == "glm4_moe" else {}
        save_model(make_config(family, own), AutoModelForCausalLM, dtype, 0, folder)
    else:
        folder, _ = save_stored(family, form, folder, dtype)
    add_prediction(folder, dtype)
    return folder


def add_prediction(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Make the last layer of a saved model its prediction layer."""
    told = json.loads((folder / "config.json").read_text())
    told["num_hidden_layers"] -= 1
    told["num_nextn_predict_layers"] = 1
    for key in ("layer_types", "mlp_layer_types", "num_mtp_layers"):
        told.pop(key, None)
    (folder / "config.json").write_text(json.dumps(told))
    tensors, hidden = load_file(folder / "model.safetensors"), told["hidden_size"]
    prefix, draw = f"model.layers.{told['num_hidden_layers']}.", torch.Generator().manual_seed(1)
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,)}
    shapes["shared_head.norm"] = (hidden,)
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=draw) * 0.3 + (len(shape) == 1)
        tensors[f"{prefix}{name}.weight"] = value.to(dtype)
    # copies, as published: other values would show who reads them
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{prefix}{name}.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], 7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
