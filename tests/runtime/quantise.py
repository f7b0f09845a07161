"""Tiny checkpoints in each stored form, and beside each one the values that it stands for."""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offplan.capabilities.packing import Packing
from tests.checkpoint.quantised import compressed
from tests.runtime.families import PUBLISHED

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
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENTS,
    "deepseek_v32": {**LATENTS, "index_n_heads": 2, "index_head_dim": 128},
    "deepseek_v4": {
        **{"num_key_value_heads": 1, "kv_lora_rank": 128, "q_lora_rank": 128, "head_dim": 128},
        **{"qk_rope_head_dim": 64, "o_groups": 2, "o_lora_rank": 128, "n_shared_experts": 1},
        **{"index_n_heads": 2, "index_head_dim": 128, "index_topk": 8, "sliding_window": 8},
        "num_hash_layers": 1,
    },
    "glm4_moe": {"intermediate_size": 448, "first_k_dense_replace": 1},
    "gpt_oss": {"intermediate_size": 128, "sliding_window": 8},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        **{"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1},
        **{"moe_shared_expert_intermediate_size": 128, "n_group": 1, "topk_group": 1},
    },
    "gemma4_text": {
        **{"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
        **{"global_head_dim": 64, "num_global_key_value_heads": 2, "sliding_window": 8},
    },
}


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


def store_modelopt_fp8(weight: torch.Tensor) -> Quantised:
    stored, values = store_fp8_whole(weight)
    scale = stored["weight_scale"].reshape(())
    return stored | {"weight_scale": scale, "input_scale": torch.tensor(0.5)}, values


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


def store_whole(
    weight: torch.Tensor, bits: int = 4, group: int = 128, has_zeros: bool = False
) -> Quantised:
    """Whole numbers in groups, about the middle or with zeros, as compressed-tensors packs them."""
    codes, zeros, scale = _make_groups(weight, bits, group, has_zeros, torch.bfloat16)
    values = (codes.unflatten(1, (-1, group)) - zeros[:, :, None]).to(torch.bfloat16)
    stored = {
        "weight_packed": _pack(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        stored["weight_zero_point"] = _pack(zeros.T, bits).T
    return stored, (values * scale[:, :, None]).flatten(1).float()


def store_bytes(weight: torch.Tensor, has_zeros: bool = False) -> Quantised:
    """Whole numbers of 8 bits, one to a byte: a scale a row, or groups with zeros."""
    group = 64 if has_zeros else weight.shape[1]
    codes, zeros, scale = _make_groups(weight, 8, group, has_zeros, torch.bfloat16)
    stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    if has_zeros:
        stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
    values = (codes.unflatten(1, (-1, group)) - zeros[:, :, None]).to(torch.bfloat16)
    return stored, (values * scale[:, :, None]).flatten(1).float()


def store_gptq(weight: torch.Tensor, bits: int = 4, is_v2: bool = False) -> Quantised:
    """Groups of 128 inputs, in v1 in the order of activations with zeros stored less one."""
    columns = weight.shape[1]
    group = (torch.arange(columns) if is_v2 else torch.randperm(columns)) // 128
    order = group.argsort(stable=True)
    padded = torch.nn.functional.pad(weight[:, order], (0, -columns % 128))
    codes, zeros, scale = _make_groups(padded, bits, 128, True, torch.float16)
    codes = codes[:, order.argsort()]
    values = scale.T[group] * (codes.T - zeros.T[group]).to(torch.float16)
    return {
        "qweight": _pack(codes, bits).T,
        "qzeros": _pack(zeros.T if is_v2 else zeros.T - 1, bits),
        "scales": scale.T,
        "g_idx": group.to(torch.int32),
    }, values.T.float().contiguous()


def store_auto_round(weight: torch.Tensor) -> Quantised:
    """As GPTQ v1, in order and without an index."""
    groups = weight.shape[1] // 128
    codes, zeros, scale = _make_groups(weight, 4, 128, True, torch.float16)
    values = (codes.unflatten(1, (groups, 128)) - zeros[:, :, None]).to(torch.float16)
    return {
        "qweight": _pack(codes, 4).T,
        "qzeros": _pack(zeros.T - 1, 4),
        "scales": scale.T,
    }, (values * scale[:, :, None]).flatten(1).float()


def store_auto_round_fp8(weight: torch.Tensor) -> Quantised:
    """What AutoRound stores by its scheme FP8_STATIC: scales in one dimension, and of inputs."""
    stored, values = store_fp8_rows(weight)
    scale = stored["weight_scale"].flatten()
    return stored | {"weight_scale": scale, "input_scale": torch.ones(1)}, values


def store_torchao(weight: torch.Tensor) -> Quantised:
    stored, values = store_bytes(weight)
    return {f"_weight_{end}": stored[name] for end, name in _TORCHAO.items()}, values


_TORCHAO = {"qdata": "weight", "scale": "weight_scale"}


def store_awq(weight: torch.Tensor) -> Quantised:
    codes, zeros, scale = _make_groups(weight, 4, 128, True, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    values = (codes.unflatten(1, (-1, 128)) - zeros[:, :, None]).to(torch.float16)
    return {
        "qweight": _pack(codes.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "qzeros": _pack(zeros.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4),
        "scales": scale.T,
    }, (values * scale[:, :, None]).flatten(1).float()


def _make_groups(
    weight: torch.Tensor, bits: int, size: int, has_zeros: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to codes, [out, in], with zeros and scales, [out, groups]."""
    groups, middle = weight.unflatten(1, (-1, size)), 1 << (bits - 1)
    scale = (groups.abs().amax(-1) / (middle - 1)).to(dtype)
    zeros = torch.full(scale.shape, middle)
    if has_zeros:
        zeros += torch.randint(-3, 3, scale.shape)
    codes = (groups / scale[:, :, None].float()).round().int() + zeros[:, :, None]
    return codes.clamp(0, 2 * middle - 1).flatten(1), zeros, scale


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, [rows, columns], along rows into words, the first in the lowest bits."""
    words = codes.long().unflatten(1, (-1, 32 // bits)) << (bits * torch.arange(32 // bits))
    return words.sum(-1).to(torch.int32)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def store_nvfp4(weight: torch.Tensor, is_modelopt: bool = False) -> Quantised:
    """Blocks of 16, whose scales are divided by that of the matrix, or multiplied by it."""
    whole = weight.abs().amax() / (6 * 448)
    blocks = weight.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    if is_modelopt:
        names, spread = ("weight", "weight_scale", "weight_scale_2"), scale.float() * whole
    else:
        whole = (1 / whole).reshape(1)
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        spread = scale.float() / whole
    # activations are rounded as well, which offplan leaves out
    inputs = "input_scale" if is_modelopt else "input_global_scale"
    others = {names[2]: whole, inputs: torch.full_like(whole, 0.5)}
    return _store_fp4(blocks, spread, scale, names, others)


def store_mxfp4(weight: torch.Tensor) -> Quantised:
    """Blocks of 32, whose scales are powers of two."""
    blocks = weight.unflatten(1, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
    scale = (exponent + 127).to(torch.uint8)
    return _store_fp4(blocks, exponent.exp2(), scale, ("weight_packed", "weight_scale"), {})


def store_mxfp8(weight: torch.Tensor) -> Quantised:
    """The same of FP8."""
    blocks = weight.unflatten(1, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 448).log2().ceil()
    codes = (blocks / exponent.exp2()[:, :, None]).to(torch.float8_e4m3fn)
    stored = {"weight": codes.flatten(1), "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, (codes.float() * exponent.exp2()[:, :, None]).flatten(1)


def store_deepseek(weight: torch.Tensor) -> Quantised:
    """FP8 blocks of 128 x 128, as DeepSeek-V4 names them: scales are powers of two."""
    stored, _ = store_fp8_blocks(weight)
    scale = stored["weight_scale_inv"].log2().ceil().exp2()
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scale.to(torch.float8_e8m0fnu)}, codes.float() * spread


def store_deepseek_expert(weight: torch.Tensor) -> Quantised:
    """MXFP4 in the types that DeepSeek-V4 has it in."""
    stored, values = store_mxfp4(weight)
    scale = stored["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": stored["weight_packed"].view(torch.int8), "scale": scale}, values


def _store_fp4(
    blocks: torch.Tensor,
    spread: torch.Tensor,
    scale: torch.Tensor,
    names: tuple[str, ...],
    others: Tensors,
) -> Quantised:
    codes = ((blocks / spread[:, :, None])[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * spread[:, :, None]).flatten(1)
    halves = codes.flatten(1).to(torch.uint8)
    packed = halves[:, ::2] | (halves[:, 1::2] << 4)
    return {names[0]: packed, names[1]: scale} | others, values


def store_bnb8(weight: torch.Tensor) -> Quantised:
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
    state = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": codes} | state, codes * largest[:, None] * 7.874015718698502e-3


def store_bnb4(
    weight: torch.Tensor, dtype: torch.dtype, kind: str = "nf4", is_nested: bool = False
) -> Quantised:
    """Blocks of 64 of the flattened matrix; any 16 values will do for codes."""
    table = torch.linspace(-1, 1, 16) if kind == "nf4" else E2M1 / 6
    blocks = weight.reshape(-1, 64)
    scale, nested = blocks.abs().amax(1), {}
    told: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    stored_scale = scale
    if is_nested:
        offset, values = scale.mean(), torch.linspace(-1, 1, 256)
        parts = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
        largest = parts.abs().amax(1)
        found = ((parts / largest[:, None])[..., None] - values).abs().argmin(-1)
        scale = (values[found] * largest[:, None]).flatten()[: len(scale)] + offset
        stored_scale = found.flatten()[: len(scale)].to(torch.uint8)
        nested = {"weight.nested_absmax": largest, "weight.nested_quant_map": values}
        told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    codes = ((blocks / scale[:, None])[..., None] - table).abs().argmin(-1)
    halves = codes.flatten().to(torch.uint8)
    state = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    return {
        "weight": ((halves[::2] << 4) | halves[1::2])[:, None],
        "weight.absmax": stored_scale,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": state,
    } | nested, (table[codes] * scale[:, None]).reshape(weight.shape)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "packing_format": "auto_round:auto_gptq",
}
_AUTO_ROUND_FP8 = {"bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8}
_AUTO_ROUND_FP8 |= {"packing_format": "auto_round:fp8_static"}
_TORCHAO_INT8 = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
}
_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    return compressed(layout, weights, None, "lm_head", "re:.*mlp.gate$", "re:.*router.*")


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
    "int4": (store_whole, _compressed("pack-quantized", _INT4 | {"symmetric": True})),
    "int4_zeros": (
        partial(store_whole, has_zeros=True),
        _compressed("pack-quantized", _INT4 | {"symmetric": False}),
    ),
    "int8": (
        partial(store_whole, bits=8, group=64),
        _compressed("pack-quantized", _INT8 | {"symmetric": True}),
    ),
    "int8_zeros": (
        partial(store_whole, bits=8, group=64, has_zeros=True),
        _compressed("pack-quantized", _INT8 | {"symmetric": False}),
    ),
    "int8_bytes": (
        store_bytes,
        _compressed("int-quantized", _INT8 | {"strategy": "channel", "symmetric": True}),
    ),
    "int8_bytes_zeros": (
        partial(store_bytes, has_zeros=True),
        _compressed("int-quantized", _INT8 | {"symmetric": False}),
    ),
    "gptq": (store_gptq, _GPTQ),
    "gptq8_v2": (
        partial(store_gptq, bits=8, is_v2=True),
        _GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": False},
    ),
    "auto_round": (store_auto_round, _AUTO_ROUND),
    "auto_round_fp8": (store_auto_round_fp8, _AUTO_ROUND | _AUTO_ROUND_FP8),
    "torchao_int8": (store_torchao, _TORCHAO_INT8),
    "awq": (store_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    "nvfp4": (store_nvfp4, _compressed("nvfp4-pack-quantized", _NVFP4)),
    "nvfp4_modelopt": (
        partial(store_nvfp4, is_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    ),
    "mxfp4_rows": (store_mxfp4, _compressed("mxfp4-pack-quantized", _NVFP4)),
    "mxfp8": (store_mxfp8, _compressed("mxfp8-quantized", _FP8_ARGS | {"group_size": 32})),
    "mxfp8_modelopt": (
        store_mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.mlp.gate"]},
    ),
    "bnb8": (store_bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
ALONE: dict[str, tuple[Callable[..., Quantised], dict[str, Any]]] = {
    "nf4": (store_bnb4, _BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "nf4_nested": (
        partial(store_bnb4, is_nested=True),
        _BNB4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "fp4": (partial(store_bnb4, kind="fp4"), _BNB4 | {"bnb_4bit_quant_type": "fp4"}),
}
"""Forms of linear layers that experts are not stored in."""


_DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": None,
    "exclude_modules": ["lm_head", "*.mlp.gate"],
    "quantized_layers": {
        **{f"model.layers.{layer}.self_attn": {"quant_algo": "FP8"} for layer in range(4)},
        **{
            f"model.layers.{layer}.mlp.experts.{expert}.{name}": {"quant_algo": "W4A16_NVFP4"}
            for layer in range(4)
            for expert in range(4)
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    },
}
_NVFP4_EXPERTS = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4"} for layer in range(4)}
OF_EXPERTS: dict[str, tuple[Callable[..., Quantised], Callable[..., Quantised], dict[str, Any]]] = {
    "deepseek": (
        *(store_deepseek, store_deepseek_expert),
        {"quantization_config": _DEEPSEEK, "expert_dtype": "fp4"},
    ),
    "modelopt_mixed": (
        *(store_modelopt_fp8, partial(store_nvfp4, is_modelopt=True)),
        {"hf_quant_config": {"quantization": _MIXED}},
    ),
    "deepseek_nvfp4": (
        *(store_deepseek, partial(store_nvfp4, is_modelopt=True)),
        {"quantization_config": _DEEPSEEK | {"quantized_layers": _NVFP4_EXPERTS}},
    ),
}
"""Forms of which routed experts have another one, and what the config says of both, or ModelOpt's
file beside it."""


_MATRIX = re.compile(r"(?<!weights_)proj|\.attn\.w|\.indexer\.wq|\.w[123]\.")
"""What names of matrices have that are stored as codes; the last three are DeepSeek-V4's."""


def save_stored(
    family: str, form: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Path, Path]:
    """Save a tiny model in a stored form, and the same model's values; returns both folders."""
    torch.manual_seed(0)
    store, said = (FORMS | ALONE).get(form, (store_mxfp4, {"quant_method": "mxfp4"}))
    if form in ALONE:
        store = partial(store, dtype=dtype)
    store_expert, more = store, dict[str, Any](quantization_config=said)
    if form in OF_EXPERTS:
        store, store_expert, of_both = OF_EXPERTS[form]
        more = dict(of_both)
    config = CONFIG_MAPPING[family](**SIZES | OWN_SIZES.get(family, {}) | sizes, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name or "bias" in name:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(4)
    plain, stored = folder / "plain", folder / "stored"
    model.to(dtype).save_pretrained(plain)
    if family in PUBLISHED:
        PUBLISHED[family](plain)
    values = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    for name, value in list(values.items()):
        if form == "mxfp4" and ".experts." in name and not name.endswith("bias"):
            found = _draw_mxfp4(value)
            tensors |= {f"{name}_{end}": tensor for end, tensor in found.items()}
            values[name] = convert_moe_packed_tensors(found["blocks"], found["scales"], dtype=dtype)
        elif form != "mxfp4" and value.ndim == 3 and ".experts." in name:
            parts, values[name] = _store_each(name, value, store_expert)
            tensors |= parts
        elif form == "awq" and value.shape[-1] % 128:
            tensors[name] = value  # AutoAWQ takes whole groups alone
        elif form != "mxfp4" and value.ndim == 2 and _MATRIX.search(name):
            parts, expanded = (store_expert if ".experts." in name else store)(value.float())
            tensors |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
            values[name] = expanded.to(dtype)
        else:
            tensors[name] = value
    if form in OF_EXPERTS:  # what predicts further tokens is one more layer, and is not loaded
        tensors |= {
            name.replace("layers.3.", "mtp.0."): value.clone()
            for name, value in tensors.items()
            if name.startswith("layers.3.")
        }
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        stored / "model.safetensors",
        {"format": "pt"},
    )
    told = json.loads((plain / "config.json").read_text())
    if "hf_quant_config" in more:
        (stored / "hf_quant_config.json").write_text(json.dumps(more.pop("hf_quant_config")))
    (stored / "config.json").write_text(json.dumps(told | more))
    return stored, plain


FEW_FORMS = ("fp8_block", "int4_zeros", "gptq", "nvfp4", "mxfp4_rows", "int8_bytes")
"""Of ``FORMS`` one for each way in which codes and scales lie, for what moves them unread."""


@cache
def save_routed(
    folder: Path, family: str, form: str, num_chosen: int
) -> tuple[Path, Packing | None]:
    """Save a tiny bfloat16 model with routed experts once; return its folder and a plan's packing.

    ``form`` is one that ``save_stored`` knows, ``values`` for none, or ``packed`` for what a plan
    packs. Each token chooses ``num_chosen`` experts.
    """
    is_plain = form in ("values", "packed")
    into = folder / f"{family}-{form}-{num_chosen}"
    into.mkdir()
    stored = "fp8_block" if is_plain else form
    both = save_stored(family, stored, into, torch.bfloat16, num_experts_per_tok=num_chosen)
    return both[is_plain], Packing(group_size=2, num_in_group=2) if form == "packed" else None


def _store_each(
    name: str, value: torch.Tensor, store: Callable[..., Quantised]
) -> tuple[Tensors, torch.Tensor]:
    """Store fused experts, [experts, out, in], one by one, as quantisers do; and their values."""
    path, _, last = name.rpartition(".")
    ends = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    tensors: Tensors = {}
    values: list[torch.Tensor] = []
    for index, fused in enumerate(value.float()):
        for end, each in zip(ends, fused.chunk(len(ends)), strict=True):
            parts, expanded = store(each)
            tensors |= {f"{path}.{index}.{end}.{of}": part for of, part in parts.items()}
            values.append(expanded)
    return tensors, torch.cat(values).view(value.shape).to(value.dtype)


def _draw_mxfp4(value: torch.Tensor) -> Tensors:
    """Draw codes for experts' weights, [experts, in, out], with scales that keep their size."""
    num_experts, num_in, num_out = value.shape
    groups = num_experts, num_out, num_in // 32
    return {
        "blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
        "scales": torch.randint(120, 123, groups, dtype=torch.uint8),
    }
