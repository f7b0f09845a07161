"""Quantised checkpoints, written to files as their tools write them, and read back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.layers import is_in_out, output_width
from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import DTYPE_BITS
from offplan.errors import CheckpointError
from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.held.held import hold
from tests.checkpoint.files import write_folder
from tests.checkpoint.quantised import (
    ATTENTION,
    CONFIG,
    FORMATS,
    NUM_WEIGHTS,
    ROUTED,
    num_bytes,
    shapes_of,
    weights,
    write_quantised,
)
from tests.held import input_embedding


def block_of(form, columns):
    """The block that headers show: channel-wise whole numbers have all of a row's columns."""
    is_whole = form.kind in (Kind.W4A16, Kind.W8A16)
    return (1, columns) if is_whole and form.block is None else form.block


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_and_what_lies_beside_it_are_one_parameter(tmp_path, name):
    format = FORMATS[name]
    model = open_model(str(write_quantised(tmp_path, format)))
    parameters = {p.name: p for layer in model.layers for p in layer.parameters}
    key, routed = parameters["self_attn.k_proj.weight"], parameters["mlp.experts.up_proj.weight"]
    for parameter, shape in ((key, ATTENTION["k_proj"]), (routed, ROUTED["up_proj"])):
        assert parameter.form == format.form._replace(block=block_of(format.form, shape[1]))
        assert parameter.shape == shape
    assert routed.is_expert
    assert len(routed.tensors) == 2
    each = {(t.name.removeprefix("model.layers.1.self_attn.k_proj.")): t[1:3] for t in key.stored}
    assert each == format.parts(*ATTENTION["k_proj"])
    assert {len(routed.of(part)) for part, _ in routed.beside} == {2}
    assert model.layers[1].segments["mlp.experts.up_proj"] == routed.nbytes
    assert routed.nbytes == 2 * num_bytes(format.parts(*ROUTED["up_proj"]))
    assert model.experts.bytes_per_expert == sum(
        num_bytes(format.parts(*shape)) for shape in ROUTED.values()
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("awq", {"group_size": 64}),
        ("awq", {"bits": 8}),
        ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"quant_method": "awq"}),
        ("fp8 blocks", {"weight_block_size": [64, 64]}),
        ("fp8 blocks", {"weight_block_size": None}),
        ("modelopt fp8", {"quant_algo": "NVFP4"}),
        ("bitsandbytes int8", {"quant_method": "eetq"}),
    ],
)
def test_what_its_config_contradicts_is_sized_and_not_understood(tmp_path, name, other):
    format = FORMATS[name]
    contradicted = format._replace(config={**(format.config or {}), **other})
    model = open_model(str(write_quantised(tmp_path, contradicted)))
    key = next(p for p in model.layers[0].parameters if p.name == "self_attn.k_proj.weight")
    assert key.form == OTHER
    assert key.shape == ATTENTION["k_proj"]
    assert key.nbytes == num_bytes(format.parts(*ATTENTION["k_proj"]))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fp8 tensor", "modules_to_not_convert"),
        ("compressed-tensors int4", "ignore"),
        ("modelopt nvfp4", "ignore"),
    ],
)
def test_an_expert_that_the_config_leaves_out_alone(tmp_path, name, key):
    expert = "model.layers.1.mlp.experts.1.up_proj"
    format, left_out = FORMATS[name], [*(FORMATS[name].config or {})[key], expert]
    stated = format._replace(config={**(format.config or {}), key: left_out})
    layer = open_model(str(write_quantised(tmp_path / "codes", stated))).layers[1]
    forms = {p.name: p.form for p in layer.parameters if p.is_expert}
    assert forms.pop("mlp.experts.up_proj.weight") == OTHER
    assert set(forms.values()) == {format.form}
    shapes = {name: s for name, s in shapes_of(stated).items() if not name.startswith(expert)}
    shapes[f"{expert}.weight"] = ("BF16", ROUTED["up_proj"])
    config = CONFIG | {"quantization_config": stated.config}
    mixed = write_folder(tmp_path / "mixed", config, {"model.safetensors": shapes})
    with pytest.raises(CheckpointError, match="experts of one layer in several forms"):
        open_model(str(mixed))


@pytest.mark.parametrize("name", FORMATS)
def test_figures_of_the_model_are_those_of_what_it_stands_for(tmp_path, name):
    format = FORMATS[name]
    model = open_model(str(write_quantised(tmp_path, format)))
    assert model.num_parameters == NUM_WEIGHTS
    assert model.total_bytes == hold(model).loaded_bytes == num_bytes(shapes_of(format))
    assert model.dtype == "bfloat16"
    assert {layer.kv_cache for layer in model.layers} == {KVCache(2 * 2 * 64 * 2)}
    assert model.head.shape == (64, 256)
    assert (input_embedding(model) is None) == format.takes_all


FUSED: dict[str, Any] = {
    "mlx": (
        {"bits": 4, "group_size": 64},
        {
            "switch_mlp.up_proj.weight": ("U32", (2, 128, 32)),
            "switch_mlp.up_proj.scales": ("BF16", (2, 128, 4)),
            "switch_mlp.up_proj.biases": ("BF16", (2, 128, 4)),
        },
        Form(Kind.W4A16, (1, 64), WordOrder.MLX),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            "experts.gate_up_proj": ("F8_E4M3", (2, 128, 256)),
            "experts.gate_up_proj_scale_inv": ("BF16", (2, 1, 2)),
        },
        Form(Kind.FP8_BLOCK, (128, 128)),
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "weight_block_size": None},
        {
            "experts.gate_up_proj": ("F8_E4M3", (2, 128, 256)),
            "experts.gate_up_proj_scale_inv": ("BF16", (2,)),
        },
        Form(Kind.FP8_TENSOR),
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {
            "experts.gate_up_proj_blocks": ("U8", (2, 128, 8, 16)),
            "experts.gate_up_proj_scales": ("U8", (2, 128, 8)),
        },
        Form(Kind.MXFP4, (1, 32)),
    ),
    "mxfp4 without its scales": (
        {"quant_method": "mxfp4"},
        {"experts.gate_up_proj_blocks": ("U8", (2, 128, 256))},
        OTHER,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_experts_that_lie_in_one_tensor(tmp_path, name):
    quantised, parts, form = FUSED[name]
    shapes = {f"model.layers.0.mlp.{part}": stored for part, stored in parts.items()}
    config = CONFIG | {"num_hidden_layers": 1, "quantization_config": quantised}
    (layer,) = open_model(str(write_folder(tmp_path, config, {"model.safetensors": shapes}))).layers
    (parameter,) = layer.parameters
    assert parameter.form == form
    assert parameter.shape == (2, 128, 256)
    assert parameter.is_fused
    assert parameter.nbytes == num_bytes(shapes) == layer.expert_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_valid_to_safetensors(tmp_path, name):
    folder = write_quantised(tmp_path, FORMATS[name])
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    expected = {key: shape for key, (_, shape) in shapes_of(FORMATS[name]).items()}
    # An F4 tensor is opened as pairs of elements.
    assert found == expected or "type of their own" in name


def test_every_dtype_of_safetensors_is_counted(tmp_path):
    shapes = {f"model.layers.0.a{dtype}.weight": (dtype, (8, 4)) for dtype in DTYPE_BITS}
    config = {"model_type": "llama", "num_hidden_layers": 1}
    folder = write_folder(tmp_path, config, {"model.safetensors": shapes})
    model = open_model(str(folder))
    assert model.num_parameters == 32 * len(DTYPE_BITS)
    assert model.total_bytes == sum(4 * bits for bits in DTYPE_BITS.values())
    with safe_open(folder / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(shapes)


@pytest.mark.parametrize("dtype", ["U32", "I32", "I8", "U8", "F8_E4M3"])
def test_a_scalar_with_scales_beside_it_is_sized_and_not_understood(tmp_path, dtype):
    names = {"weight": dtype, "scales": "F16", "biases": "F16"}
    shapes = {f"model.layers.0.mlp.up_proj.{end}": (of, ()) for end, of in names.items()}
    config = {"model_type": "llama", "num_hidden_layers": 1}
    model = open_model(str(write_folder(tmp_path, config, {"model.safetensors": shapes})))
    assert model.total_bytes == sum(DTYPE_BITS[of] // 8 for of, _ in shapes.values())


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].from_config])
def test_the_config_alone_tells_what_is_stored(tmp_path, name):
    pytest.importorskip("transformers")
    folder = write_quantised(tmp_path, FORMATS[name])
    stored, alone = open_model(str(folder)), open_model(str(folder / "config.json"))
    assert alone.headers_sha256 == stored.headers_sha256
    assert alone.num_parameters == stored.num_parameters
    assert [layer.key for layer in alone.layers] == [layer.key for layer in stored.layers]


UNTOLD = [name for name in FORMATS if not FORMATS[name].from_config and name != "mlx"]
"""MLX's own files have experts in stacks."""


@pytest.mark.parametrize("name", UNTOLD)
def test_what_the_config_does_not_determine_is_refused(tmp_path, name):
    pytest.importorskip("transformers")
    folder = write_quantised(tmp_path, FORMATS[name])
    with pytest.raises(CheckpointError, match="name the folder or the Hub id"):
        open_model(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (
            {"quant_method": "aqlm"},
            "of the method 'aqlm', which offplan does not read (it reads au",
        ),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "found bits: 5, group_size: 128 "),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "found version: 'gemv' in its"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "found rotation: 'hadamard'"),
        ({"quant_method": "compressed-tensors"}, "found no config_groups in its"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4Weight"}}},
            "quant_type: {'default': {'_type': 'Int4Weight'}} in its",
        ),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(tmp_path, stated, words):
    pytest.importorskip("transformers")
    config = CONFIG | {"quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        open_model(tmp_path / "config.json")
    assert words in str(raised.value)
    assert "which offplan does not read" in str(raised.value)
    assert "determine" not in str(raised.value)


QWEN3_VL_MOE = {
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 48,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [],
    },
}


def open_qwen3_vl_moe(folder, **more):
    config = QWEN3_VL_MOE | more
    (folder / "config.json").write_text(json.dumps(config))
    (layer,) = open_model(str(folder / "config.json")).layers
    return {p.name.partition("experts.")[2]: p for p in layer.parameters if p.is_expert}


def test_fused_experts_lie_as_they_are_published(tmp_path):
    pytest.importorskip("transformers")
    fused = open_qwen3_vl_moe(tmp_path)
    assert {name: p.shape for name, p in fused.items()} == {
        "gate_up_proj": (2, 64, 96),
        "down_proj": (2, 48, 64),
    }
    architecture = read_architecture(QWEN3_VL_MOE)
    for parameter in fused.values():
        (tensor,) = parameter.tensors
        number, num_in, num_out = tensor.shape
        saved = replace(parameter, tensors=(tensor._replace(shape=(number, num_out, num_in)),))
        assert is_in_out(parameter, architecture)
        assert not is_in_out(saved, architecture)  # as transformers 5 saves them
        assert output_width(saved, architecture) == output_width(parameter, architecture) == num_out
    quantised = FORMATS["modelopt nvfp4"].config
    alone = open_qwen3_vl_moe(tmp_path, quantization_config=quantised)
    assert {name: p.shape for name, p in alone.items()} == {
        "gate_proj.weight": (48, 64),
        "up_proj.weight": (48, 64),
        "down_proj.weight": (64, 48),
    }


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes int8", "torchao int8"])
def test_fused_experts_are_none_of_a_tool_for_linear_layers(tmp_path, name):
    """``test_every_type`` holds both to what the tools themselves write."""
    pytest.importorskip("transformers")
    fused = open_qwen3_vl_moe(tmp_path, quantization_config=FORMATS[name].config)
    assert {p.form.is_raw for p in fused.values()} == {True}
    stated = CONFIG | {"quantization_config": FORMATS[name].config}
    for version, is_raw in (("5.3.0", True), ("4.57.1", False)):  # which had them one by one
        config = stated | {"transformers_version": version}
        (tmp_path / "config.json").write_text(json.dumps(config))
        layer = open_model(str(tmp_path / "config.json")).layers[1]
        assert {p.form.is_raw for p in layer.parameters if p.is_expert} == {is_raw}


@pytest.mark.parametrize("source", ["", "config.json"])
def test_what_modelopt_says_beside_a_config_that_is_silent_is_read(tmp_path, source):
    format = FORMATS["modelopt fp8"]
    folder = write_quantised(tmp_path / "told", format)
    silent = write_quantised(tmp_path / "silent", format._replace(config=None))
    told = {"quant_algo": "FP8", "exclude_modules": ["lm_head*"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": told}
    (silent / "hf_quant_config.json").write_text(json.dumps(beside))
    model = open_model(str(silent / source))
    assert model.headers_sha256 == open_model(str(folder)).headers_sha256
    assert model.architecture.quantisation is not None


def test_what_a_text_part_says_goes_before_what_lies_beside(tmp_path):
    format = FORMATS["fp8 blocks"]
    folder = write_quantised(tmp_path, format._replace(config=None))
    text = CONFIG | {"quantization_config": format.config}
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert open_model(str(folder)).architecture.quantisation.method == "fp8"


GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
"""openai/gpt-oss-20b, which names no dtype."""
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 5,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
"""deepseek-ai/DeepSeek-V3, but for the number of its layers, 61."""


GRANITE = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 1,
    "layer_types": ["attention"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
"""Tiny, as Granite 4.0's."""


def read_alone(folder, config):
    """The model that a config alone describes."""
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(str(folder / "config.json"))


def test_gpt_oss_20b_from_its_config(tmp_path):
    model = read_alone(tmp_path, GPT_OSS)
    assert model.total_bytes == 13_761_264_768
    assert model.num_parameters == 20_914_757_184
    assert model.experts.bytes_per_expert == (5760 + 2880) * (90 * 17 + 2)
    up = next(p for p in model.layers[0].parameters if p.name == "mlp.experts.gate_up_proj")
    assert up.form == Form(Kind.MXFP4, (1, 32))
    assert up.shape == (32, 5760, 2880)
    assert [t.shape for t in up.of(Component.SCALE)] == [(32, 5760, 90)]
    assert "the config names no dtype: took bfloat16" in model.notes


def test_experts_of_mlx_are_stacks_of_each_matrix(tmp_path):
    config = CONFIG | {"quantization": {"group_size": 64, "bits": 4}}
    model = read_alone(tmp_path, config)
    experts = {p.name: p for p in model.layers[1].parameters if p.is_expert}
    assert {name: p.shape for name, p in experts.items()} == {
        f"mlp.switch_mlp.{name}.weight": (2, *shape) for name, shape in ROUTED.items()
    }
    form = Form(Kind.W4A16, (1, 64), WordOrder.MLX)
    assert {(p.form, 32 * p.nbytes) for p in experts.values()} == {(form, 18 * 2 * 128 * 256)}
    assert model.num_parameters == NUM_WEIGHTS


def test_experts_of_gpt_oss_that_unsloth_makes_linear_layers_of(tmp_path):
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    skipped = {"llm_int8_skip_modules": ["lm_head", "router", "self_attn"]}
    fused = GPT_OSS | {"num_hidden_layers": 1, "quantization_config": nf4 | skipped}
    plain = read_alone(tmp_path, fused)
    model = read_alone(tmp_path, fused | {"unsloth_fixed": True})
    num_weights = 32 * (5760 + 2880) * 2880
    taken = num_weights // 2 + num_weights // 64 * 4 + 64 * (16 * 4 + 96)
    assert plain.total_bytes - model.total_bytes == 2 * num_weights - taken
    names = {t.name for p in model.layers[0].parameters for t in p.tensors}
    assert "model.layers.0.mlp.experts.gate_up_projs.31.weight" in names
    assert "model.layers.0.mlp.experts.down_projs.0.weight" in names
    assert model.num_parameters == plain.num_parameters


def test_experts_of_granite_in_fp8(tmp_path):
    """As llm-compressor 0.11 stores them: a stack of codes, and a scale for each row of each."""
    rows = weights(format="float-quantized", num_bits=8, type="float", strategy="channel")
    rows["ignore"] = ["lm_head", "re:.*block_sparse_moe\\.router"]
    config = GRANITE | {"quantization_config": rows}
    (layer,) = read_alone(tmp_path, config).layers
    found = {p.name: p for p in layer.parameters if p.is_expert}
    assert {name.rpartition("moe.")[2] for name in found} == {
        "input_linear.weight",
        "output_linear.weight",
    }
    for parameter in found.values():
        assert parameter.form == Form(Kind.FP8_CHANNEL)
        assert parameter.nbytes == math.prod(parameter.shape) + 2 * math.prod(parameter.shape[:2])
    assert layer.parameters[-1].name == "shared_mlp.output_linear.weight"
    assert layer.parameters[-1].form == Form(Kind.FP8_CHANNEL)


def test_deepseek_v3_from_its_config(tmp_path):
    model = read_alone(tmp_path, DEEPSEEK_V3)
    dense, mixed = model.layers[0].nbytes, model.layers[4].nbytes
    total = hold(model).outside_bytes + 3 * dense + 58 * mixed
    # The layer that predicts a further token: its own embedding and head, and two hidden states in.
    predicting = mixed + 2 * (2 * 129280 * 7168 + 2 * 7168 * 7168 + 3 * 7168)
    # The published files have 688,586,727,753 bytes, 130 of them in a header for each tensor.
    assert total + predicting == pytest.approx(688_586_727_753 - 91_991 * 130, rel=1e-6)
    assert any("scales taken as F32" in note for note in model.notes)


def test_qwen3_8b_fp8_from_its_config(tmp_path):
    config = json.loads((Path(__file__).parent.parent / "models/qwen3-8b/config.json").read_text())
    quantised = DEEPSEEK_V3["quantization_config"]
    model = read_alone(tmp_path, config | {"quantization_config": quantised})
    raw = 2 * (2 * 151936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096)
    weights = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert model.total_bytes == raw + weights + 2 * weights // 128**2
    assert any("scales taken as BF16" in note for note in model.notes)
