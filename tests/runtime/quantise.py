"""Tiny checkpoints in each stored form, and beside each one the values that it stands for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Quantised = tuple[Tensors, torch.Tensor]
"""What is stored of a weight, by the ends of its names, and the values that it stands for."""

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "sliding_window": None,
}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OWN_SIZES = {"deepseek_v3": LATENTS, "gpt_oss": {"intermediate_size": 128, "sliding_window": 8}}


def store_fp8_blocks(weight: torch.Tensor) -> Quantised:
    num_out, num_in = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % 128, 0, -num_out % 128))
    scale = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:num_out, :num_in]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, _expand_fp8(codes, scale)


def store_fp8_rows(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, _expand_fp8(codes, scale)


def store_fp8_whole(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().amax().reshape(1) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, _expand_fp8(codes, scale.view(1, 1))


def _expand_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Expand as stock does, which wants whole blocks."""
    num_out, num_in = codes.shape
    high, wide = (
        128 if size > 1 or codes.shape[at] <= 128 else 0 for at, size in enumerate(scale.shape)
    )
    pads = (0, -num_in % 128 if wide else 0, 0, -num_out % 128 if high else 0)
    if scale.shape in ((num_out, 1), (1, 1)):
        pads = (0, 0, 0, 0)
    padded = torch.nn.functional.pad(codes.float(), pads).to(torch.float8_e4m3fn)
    expanded: torch.Tensor = Fp8Dequantize(None)._dequantize_one(padded, scale, torch.float32)
    return expanded[:num_out, :num_in].contiguous()


def store_int4(weight: torch.Tensor) -> Quantised:
    """Groups of 128 about zero, as compressed-tensors packs them."""
    return _store_int4(weight, torch.full((len(weight), weight.shape[1] // 128), 8))


def store_int4_zeros(weight: torch.Tensor) -> Quantised:
    """Groups of 128 that have zeros of their own."""
    zeros = torch.randint(5, 11, (len(weight), weight.shape[1] // 128))
    stored, values = _store_int4(weight, zeros)
    packed = zeros.unflatten(0, (-1, 8)) << (4 * torch.arange(8))[:, None]
    return stored | {"weight_zero_point": packed.sum(1).to(torch.int32)}, values


def _store_int4(weight: torch.Tensor, zeros: torch.Tensor) -> Quantised:
    groups = weight.unflatten(1, (-1, 128))
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    spread = scale[:, :, None].float()
    codes = (groups / spread).round().add(zeros[:, :, None]).clamp(0, 15)
    values = (codes - zeros[:, :, None]).to(torch.bfloat16) * scale[:, :, None]
    words = codes.flatten(1).long().unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    return {
        "weight_packed": words.sum(-1).to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }, values.flatten(1).float()


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*router.*"],
    }


FORMS: dict[str, tuple[Callable[[torch.Tensor], Quantised], dict[str, Any]]] = {
    "fp8_block": (store_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8_channel": (
        store_fp8_rows,
        _compressed("float-quantized", _FP8_ARGS | {"strategy": "channel"}),
    ),
    "fp8_tensor": (
        store_fp8_whole,
        _compressed("float-quantized", _FP8_ARGS | {"strategy": "tensor"}),
    ),
    "int4": (store_int4, _compressed("pack-quantized", _INT4 | {"symmetric": True})),
    "int4_zeros": (store_int4_zeros, _compressed("pack-quantized", _INT4 | {"symmetric": False})),
}


def save_stored(
    family: str, form: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Path, Path]:
    """Save a tiny model in a stored form, and the same model's values; returns both folders."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | OWN_SIZES.get(family, {}) | sizes, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name or "bias" in name:
                parameter.normal_(0, 0.1)
    plain, stored = folder / "plain", folder / "stored"
    model.to(dtype).save_pretrained(plain)
    values = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    for name, value in list(values.items()):
        if form == "mxfp4" and ".experts." in name and not name.endswith("bias"):
            found = _draw_mxfp4(value)
            tensors |= {f"{name}_{end}": tensor for end, tensor in found.items()}
            values[name] = convert_moe_packed_tensors(found["blocks"], found["scales"], dtype=dtype)
        elif form != "mxfp4" and value.ndim == 2 and "proj" in name:
            parts, expanded = FORMS[form][0](value.float())
            tensors |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
            values[name] = expanded.to(dtype)
        else:
            tensors[name] = value
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        stored / "model.safetensors",
        {"format": "pt"},
    )
    told = json.loads((plain / "config.json").read_text())
    quantisation = {"quant_method": "mxfp4"} if form == "mxfp4" else FORMS[form][1]
    (stored / "config.json").write_text(json.dumps(told | {"quantization_config": quantisation}))
    return stored, plain


def _draw_mxfp4(value: torch.Tensor) -> Tensors:
    """Draw codes for experts' weights, [experts, in, out], with scales that keep their size."""
    num_experts, num_in, num_out = value.shape
    groups = num_experts, num_out, num_in // 32
    return {
        "blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
        "scales": torch.randint(120, 123, groups, dtype=torch.uint8),
    }
