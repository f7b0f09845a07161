"""Tiny checkpoints of each stored form, named, typed and shaped as their tools write them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offplan.checkpoint.tensors import DTYPE_BITS
from offplan.forms.form import OTHER, Form, Kind, WordOrder
from tests.checkpoint.files import Shapes, write_folder

HIDDEN, INNER, EXPERT_INNER, VOCABULARY = 256, 512, 128, 64
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": EXPERT_INNER,
    "mlp_only_layers": [0],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MLP = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
ROUTED = {
    "gate_proj": (EXPERT_INNER, HIDDEN),
    "up_proj": (EXPERT_INNER, HIDDEN),
    "down_proj": (HIDDEN, EXPERT_INNER),
}
ATTENTION = {
    "q_proj": (256, HIDDEN),
    "k_proj": (128, HIDDEN),
    "v_proj": (128, HIDDEN),
    "o_proj": (HIDDEN, 256),
}
LINEAR = {
    **{
        f"model.layers.{at}.self_attn.{name}": ATTENTION[name]
        for at in (0, 1)
        for name in ATTENTION
    },
    **{f"model.layers.0.mlp.{name}": shape for name, shape in MLP.items()},
    **{
        f"model.layers.1.mlp.experts.{expert}.{name}": shape
        for expert in (0, 1)
        for name, shape in ROUTED.items()
    },
}
"""The linear layers of the model, [out, in]."""
RAW = {
    "model.embed_tokens": (VOCABULARY, HIDDEN),
    "model.norm": (HIDDEN,),
    "lm_head": (VOCABULARY, HIDDEN),
    "model.layers.1.mlp.gate": (2, HIDDEN),
    **{
        f"model.layers.{at}.{name}": shape
        for at in (0, 1)
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
        }.items()
    },
}
NUM_WEIGHTS = sum(math.prod(shape) for shape in (*LINEAR.values(), *RAW.values()))

Components = dict[str, tuple[str, tuple[int, ...]]]


class Format(NamedTuple):
    """A way that a tool quantises."""

    config: Mapping[str, Any] | None
    """What it writes as ``quantization_config``."""
    parts: Callable[[int, int], Components]
    """What it stores of a linear layer [out, in]."""
    form: Form
    takes_all: bool = False
    """Whether embedding and head are quantised too."""
    from_config: bool = True
    """Whether the config alone says what is stored."""


def stores(*described: str) -> Callable[[int, int], Components]:
    """Make what is stored of a layer [out, inner].

    Each tensor is described by the end of its name, its type and its sizes, as Python has them.
    """

    def store(out: int, inner: int) -> Components:
        stored = {}
        for each in described:
            name, dtype, *sizes = each.split()
            stored[name] = dtype, tuple(eval(size, {"out": out, "inner": inner}) for size in sizes)
        return stored

    return store


_ZEROS_AND_SCALES = ("qzeros I32 inner//128 out//8", "scales F16 inner//128 out")
GPTQ_WORDS = ("qweight I32 inner//8 out", *_ZEROS_AND_SCALES)
"""Words of 4 bits along the inputs, in groups of 128, without an index."""
AWQ_WORDS = ("qweight I32 inner out//8", *_ZEROS_AND_SCALES)
"""Words of 4 bits along the outputs, in groups of 128 inputs."""


def compressed(
    layout: str, weights: Mapping[str, Any], inputs: Any = None, *ignore: str
) -> dict[str, Any]:
    """The config of compressed-tensors for one group of all linear layers but those ignored."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": [*ignore],
    }


def weights(**arguments: Any) -> dict[str, Any]:
    """The config of compressed-tensors for all linear layers but head and router."""
    layout, inputs = arguments.pop("format"), arguments.pop("inputs", None)
    return compressed(layout, arguments, inputs, "lm_head", "re:.*mlp\\.gate$")


INT4 = {"format": "pack-quantized", "num_bits": 4, "type": "int", "group_size": 128}
AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "bits": 4, "group_size": 128}
AUTO_ROUND |= {"sym": True, "block_name_to_quantize": "model.layers"}
AUTO_ROUND_FP8 = AUTO_ROUND | {"data_type": "fp", "bits": 8, "fmt": "e4m3"}
AUTO_ROUND_FLOATS = AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}
FORMATS = {
    "fp8 blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        stores("weight F8_E4M3 out inner", "weight_scale_inv BF16 out//128 inner//128"),
        Form(Kind.FP8_BLOCK, (128, 128)),
    ),
    "fp8 tensor": Format(
        {
            "quant_method": "fp8",
            "weight_block_size": None,
            "activation_scheme": "static",
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"],
        },
        stores("weight F8_E4M3 out inner", "weight_scale_inv BF16", "activation_scale BF16"),
        Form(Kind.FP8_TENSOR),
    ),
    "compressed-tensors fp8 channel": Format(
        weights(
            format="float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
        ),
        stores("weight F8_E4M3 out inner", "weight_scale BF16 out 1"),
        Form(Kind.FP8_CHANNEL),
    ),
    "compressed-tensors fp8 tensor": Format(
        weights(
            format="float-quantized",
            num_bits=8,
            type="float",
            strategy="tensor",
            inputs={"dynamic": False, "num_bits": 8},
        ),
        stores("weight F8_E4M3 out inner", "weight_scale BF16 1", "input_scale BF16 1"),
        Form(Kind.FP8_TENSOR),
    ),
    "compressed-tensors fp8 blocks": Format(
        weights(
            format="float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        stores("weight F8_E4M3 out inner", "weight_scale BF16 out//128 inner//128"),
        Form(Kind.FP8_BLOCK, (128, 128)),
    ),
    "compressed-tensors int4": Format(
        weights(**INT4, strategy="group", symmetric=True),
        stores(
            "weight_packed I32 out inner//8",
            "weight_scale BF16 out inner//128",
            "weight_shape I64 2",
        ),
        Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    ),
    "compressed-tensors int4 with zeros, by activation": Format(
        weights(**INT4, strategy="group", symmetric=False, actorder="group"),
        stores(
            "weight_packed I32 out inner//8",
            "weight_scale BF16 out inner//128",
            "weight_zero_point I32 out//8 inner//128",
            "weight_shape I64 2",
            "weight_g_idx I32 inner",
        ),
        Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    ),
    "compressed-tensors int8 packed": Format(
        weights(format="pack-quantized", num_bits=8, type="int", group_size=64, strategy="group"),
        stores(
            "weight_packed I32 out inner//4",
            "weight_scale BF16 out inner//64",
            "weight_shape I64 2",
        ),
        Form(Kind.W8A16, (1, 64), WordOrder.COMPRESSED_TENSORS),
    ),
    "compressed-tensors nvfp4": Format(
        weights(
            format="nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            inputs={"dynamic": "local", "num_bits": 4},
        ),
        stores(
            "weight_packed U8 out inner//2",
            "weight_scale F8_E4M3 out inner//16",
            "weight_global_scale F32 1",
            "input_global_scale F32 1",
        ),
        Form(Kind.NVFP4, (1, 16)),
    ),
    "compressed-tensors mxfp4": Format(
        weights(format="mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        stores("weight_packed U8 out inner//2", "weight_scale U8 out inner//32"),
        Form(Kind.MXFP4, (1, 32)),
    ),
    "modelopt nvfp4": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.*.mlp.gate"],
        },
        stores(
            "weight U8 out inner//2",
            "weight_scale F8_E4M3 out inner//16",
            "weight_scale_2 F32",
            "input_scale F32",
        ),
        Form(Kind.NVFP4, (1, 16)),
    ),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head*"]},
        stores("weight F8_E4M3 out inner", "weight_scale F32", "input_scale F32"),
        Form(Kind.FP8_TENSOR),
    ),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
        stores(*GPTQ_WORDS, "g_idx I32 inner"),
        Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    ),
    "gptq of 8 bits, a scale a row": Format(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        stores(
            "qweight I32 inner//4 out", "qzeros I32 1 out//4", "scales F16 1 out", "g_idx I32 inner"
        ),
        Form(Kind.W8A16, None, WordOrder.GPTQ_V2),
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        stores(*AWQ_WORDS),
        Form(Kind.W4A16, (1, 128), WordOrder.AWQ),
    ),
    "mlx": Format(
        {"bits": 4, "group_size": 64},
        stores("weight U32 out inner//8", "scales BF16 out inner//64", "biases BF16 out inner//64"),
        Form(Kind.W4A16, (1, 64), WordOrder.MLX),
        takes_all=True,
        from_config=False,
    ),
    "bitsandbytes nf4": Format(
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        stores(
            "weight U8 out*inner//2 1",
            "weight.absmax U8 out*inner//64",
            "weight.nested_absmax F32 -(-out*inner//64//256)",
            "weight.nested_quant_map F32 256",
            "weight.quant_map F32 16",
            "weight.quant_state.bitsandbytes__nf4 U8 96",
        ),
        Form(Kind.NF4),
    ),
    "bitsandbytes fp4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        stores(
            "weight U8 out*inner//2 1",
            "weight.absmax F32 out*inner//64",
            "weight.quant_map F32 16",
            "weight.quant_state.bitsandbytes__fp4 U8 96",
        ),
        Form(Kind.FP4),
    ),
    "bitsandbytes int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        stores("weight I8 out inner", "SCB F32 out", "weight_format U8"),
        Form(Kind.BNB8),
    ),
    "torchao int8": Format(
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
        stores("_weight_qdata I8 out inner", "_weight_scale BF16 out 1"),
        Form(Kind.W8A16, None, WordOrder.NONE),
    ),
    "torchao float8": Format(
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
        stores("_weight_qdata F8_E4M3 out inner", "_weight_scale F32 out 1"),
        Form(Kind.FP8_CHANNEL),
    ),
    "torchao, in a way that is not known": Format(
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        stores("_weight_qdata I8 out inner", "_weight_scale BF16 out 1"),
        OTHER,
        from_config=False,
    ),
    "fp8 blocks, as MiniMax names the type": Format(
        {
            "quant_method": "fp8",
            "fmt": "float8_e4m3fn",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        stores("weight F8_E4M3 out inner", "weight_scale_inv BF16 out//128 inner//128"),
        Form(Kind.FP8_BLOCK, (128, 128)),
    ),
    "modelopt nvfp4 of weights alone, layer by layer": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": ["mtp*"],
            "quantized_layers": {
                name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in LINEAR
            },
        },
        stores(
            "weight U8 out inner//2", "weight_scale F8_E4M3 out inner//16", "weight_scale_2 F32"
        ),
        Form(Kind.NVFP4, (1, 16)),
    ),
    "modelopt mxfp8, named by what modules lie in": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers": {"quant_algo": "MXFP8"}},
        },
        stores("weight F8_E4M3 out inner", "weight_scale U8 out inner//32"),
        Form(Kind.FP8_BLOCK, (1, 32)),
    ),
    "modelopt without a method": Format(
        {"producer": {"name": "modelopt"}, "quant_algo": "FP8", "ignore": ["lm_head"]},
        stores("weight F8_E4M3 out inner", "weight_scale F32", "input_scale F32"),
        Form(Kind.FP8_TENSOR),
    ),
    "auto-round": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"lm_head": {"bits": 16}},
        },
        stores(*GPTQ_WORDS),
        Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    ),
    "auto-round of 3 bits": Format(
        AUTO_ROUND | {"bits": 3, "packing_format": "auto_round:auto_gptq"},
        stores(
            "qweight I32 3*inner//32 out",
            "qzeros I32 inner//128 3*out//32",
            "scales F16 inner//128 out",
        ),
        OTHER,
    ),
    "auto-round awq": Format(
        AUTO_ROUND | {"sym": False, "packing_format": "auto_round:auto_awq"},
        stores(*AWQ_WORDS),
        Form(Kind.W4A16, (1, 128), WordOrder.AWQ),
    ),
    "auto-round gptqmodel": Format(
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"},
        stores(*GPTQ_WORDS, "g_idx I32 inner"),
        Form(Kind.W4A16, (1, 128), WordOrder.GPTQ_V2),
    ),
    "auto-round fp8 static": Format(
        AUTO_ROUND_FP8
        | {"group_size": -1, "act_bits": 8, "packing_format": "auto_round:fp8_static"},
        stores("weight F8_E4M3 out inner", "weight_scale BF16 out", "input_scale BF16 1"),
        Form(Kind.FP8_CHANNEL),
    ),
    "auto-round fp8 of weights alone": Format(
        AUTO_ROUND_FP8 | {"group_size": 0},
        stores("weight F8_E4M3 out inner", "weight_scale BF16 1"),
        Form(Kind.FP8_TENSOR),
    ),
    "auto-round mxfp4": Format(
        AUTO_ROUND_FLOATS | {"data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4},
        stores("weight_packed U8 out inner//2", "weight_scale U8 out inner//32"),
        Form(Kind.MXFP4, (1, 32)),
    ),
    "auto-round mxfp8": Format(
        AUTO_ROUND_FLOATS | {"data_type": "mx_fp", "bits": 8, "group_size": 32, "act_bits": 8},
        stores("weight F8_E4M3 out inner", "weight_scale U8 out inner//32"),
        Form(Kind.FP8_BLOCK, (1, 32)),
    ),
    "auto-round nvfp4": Format(
        AUTO_ROUND_FLOATS | {"data_type": "nv_fp", "bits": 4, "group_size": 16, "act_bits": 4},
        stores(
            "weight_packed U8 out inner//2",
            "weight_scale F8_E4M3 out inner//16",
            "weight_global_scale F32 1",
            "input_global_scale F32 1",
        ),
        Form(Kind.NVFP4, (1, 16)),
    ),
    "torchao 0.18 int8": Format(
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "Int8WeightOnlyConfig",
                    "_data": {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}},
                }
            },
        },
        stores(
            "_weight_qdata I8 out inner", "_weight_scale F32 out 1", "_weight_zero_point I8 out 1"
        ),
        Form(Kind.W8A16, None, WordOrder.NONE),
    ),
    "compressed-tensors mxfp8": Format(
        weights(format="mxfp8-quantized", num_bits=8, type="float", group_size=32),
        stores("weight F8_E4M3 out inner", "weight_scale U8 out inner//32"),
        Form(Kind.FP8_BLOCK, (1, 32)),
    ),
    "4-bit floats in a type of their own": Format(
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        stores("weight F4 out inner", "scale F8_E8M0 out inner//32"),
        Form(Kind.MXFP4, (1, 32)),
        from_config=False,
    ),
}


def shapes_of(format: Format) -> Shapes:
    """The tensors of the model in a format."""
    linear = LINEAR | (
        {name: RAW[name] for name in ("model.embed_tokens", "lm_head")} if format.takes_all else {}
    )
    quantised = {
        f"{module}.{part}": stored
        for module, (out, inner) in linear.items()
        for part, stored in format.parts(out, inner).items()
    }
    raw = {f"{name}.weight": ("BF16", RAW[name]) for name in RAW if name not in linear}
    return quantised | raw


def write_quantised(folder: Path, format: Format) -> Path:
    """Write the model in a format."""
    quantised = {} if format.config is None else {"quantization_config": format.config}
    return write_folder(folder, CONFIG | quantised, {"model.safetensors": shapes_of(format)})


def num_bytes(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of these tensors."""
    return sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in parts.values())
