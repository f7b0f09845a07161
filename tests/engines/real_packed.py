"""Tiny bfloat16 checkpoints, and vLLM's loading of them with their weights packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offplan.forms.packed import PACKED
from offplan.runtime.forms.reference import expand
from tests.engines import real_vllm

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
OF_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {
    **{"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64},
    **{"v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "head_dim": 64, "num_key_value_heads": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": OF_EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "deepseek_v2": OF_EXPERTS | LATENT,
    "deepseek_v3": OF_EXPERTS | LATENT | {"topk_method": "noaux_tc"},
}


def save(family: str, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a tiny bfloat16 checkpoint of a family; return its tensors."""
    torch.manual_seed(0)
    sizes = SIZES | MODELS[family] | changes
    config = CONFIG_MAPPING[family](**sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    told = {key: value for key, value in sizes.items() if value is not None}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load(folder: Path, *more: str, quantised: bool = True) -> Any:
    words = ["serve", str(folder), "--max-model-len", "64", "--dtype", "bfloat16", *more]
    words += ["--quantization", "offplan_packed"] if quantised else []
    return real_vllm.load(real_vllm.parse_command(words), folder)


def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register packed weights with vLLM, by stand-ins for what only a GPU computes."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    import offplan.vllm_packed as module

    def activate(_: Any, out: torch.Tensor, x: torch.Tensor, **__: Any) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return out.copy_(torch.nn.functional.silu(gate) * up)

    monkeypatch.setattr(module, "apply_moe_activation", activate)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", lambda *_, **__: None)
    module.register()
    return module


def values_of(packed: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the values of all that is multiplied, by the names of vLLM's modules."""
    found = {}
    for path, module in model.named_modules():
        for name in ("weight", "w13_weight", "w2_weight"):
            if hasattr(module, f"{name}_packed"):
                parts = packed._held(module, name)
                found[f"{path}.{name}"] = expand(PACKED, parts, torch.bfloat16)
            elif name in module._parameters:
                found[f"{path}.{name}"] = module._parameters[name].data
    return found
