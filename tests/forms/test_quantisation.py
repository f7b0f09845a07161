"""What is read of a ``quantization_config``, right or wrong."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.forms.form import Form, Kind, WordOrder
from offplan.forms.methods import read_quantisation
from tests.checkpoint.quantised import compressed

METHODS = (
    *("fp8", "mxfp4", "bitsandbytes", "gptq", "awq"),
    *("compressed-tensors", "modelopt", "mlx", "torchao", "auto-round"),
)
KEYS = (
    *("bits", "group_size", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
    *("activation_scheme", "ignore", "config_groups", "format", "dynamic", "checkpoint_format"),
    *("version", "zero_point", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
    *("quant_algo", "exclude_modules", "quantization", "modules_in_block_to_quantize", "mode"),
    *("quant_type", "quantized_layers", "kv_cache_scheme", "extra_config", "packing_format"),
    *("expert_dtype", "fmt", "block_name_to_quantize"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["Linear", "group", "int", "pack-quantized", "nf4", "NVFP4", "awq", "-:a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["weights", "targets", "num_bits", "strategy", "type", "-:a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.sampled_from(METHODS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_no_config_breaks_the_reader(method: str, stated: dict[str, Any]) -> None:
    quantisation = read_quantisation(
        {"quantization_config": stated | {"quant_method": method}}, "llama", "bfloat16"
    )
    assert quantisation is not None
    quantisation.stated("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("stated", [None, {}, [], "", 0])
def test_a_config_that_says_nothing(stated: Any) -> None:
    assert read_quantisation({"quantization_config": stated}, "llama", None) is None


TURNED = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}
ROTATED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "rotation": "hadamard"}


@pytest.mark.parametrize(
    "stated", ["fp8", [1], 1, {"bits": 4}, {"quant_method": "new"}, TURNED, ROTATED]
)
def test_what_is_not_known_is_quantised_all_the_same(stated: Any) -> None:
    quantisation = read_quantisation({"quantization_config": stated}, "llama", None)
    assert quantisation is not None
    assert not quantisation.is_known
    assert quantisation.stated("model.layers.0.mlp.up_proj") is None


def test_a_pattern_that_is_refused_leaves_headers_to_speak() -> None:
    stated = {"quant_method": "fp8", "modules_to_not_convert": ["(a+)+$"]}
    quantisation = read_quantisation({"quantization_config": stated}, "llama", None)
    assert quantisation is not None
    assert quantisation.stated("model.layers.0.mlp.up_proj") is None


def read(module: str, **stated: Any) -> Form | None:
    quantisation = read_quantisation({"quantization_config": stated}, "llama", "bfloat16")
    assert quantisation is not None
    scheme = quantisation.stated(module)
    return None if scheme is None else scheme.form


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_names_and_patterns_of_compressed_tensors_go_before_the_class(is_reversed: bool) -> None:
    groups = {
        "group_0": {"targets": [r"re:.*down_proj$"], "weights": INT8},
        "group_1": {"targets": ["Linear"], "weights": INT4},
        "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": INT4},
    }
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": dict(sorted(groups.items(), reverse=is_reversed)),
        "ignore": ["lm_head"],
    }
    order = WordOrder.COMPRESSED_TENSORS
    assert read("model.layers.0.mlp.down_proj", **stated) == Form(Kind.W8A16, None, order)
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        assert read(module, **stated) == Form(Kind.W4A16, (1, 32), order)
    assert read("lm_head", **stated) is None


@pytest.mark.parametrize(
    "block", [{}, {"weight_block_size": None}, {"weight_block_size": [64, 128]}]
)
def test_blocks_of_fp8_are_those_that_transformers_takes(block: dict[str, Any]) -> None:
    configs = pytest.importorskip("transformers.utils.quantization_config")
    size = configs.FineGrainedFP8Config(**block).weight_block_size
    form = Form(Kind.FP8_TENSOR) if size is None else Form(Kind.FP8_BLOCK, tuple(size))
    assert read("model.layers.0.mlp.up_proj", quant_method="fp8", **block) == form


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_either_key_names_the_layout(key: str) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, key: "GPTQ_V2"}
    v2 = Form(Kind.W4A16, (1, 128), WordOrder.GPTQ_V2)
    assert read("model.layers.0.mlp.up_proj", **stated) == v2


AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
}


AUTO_ROUND_FP8 = AUTO_ROUND | {
    "bits": 8,
    "data_type": "fp",
    "group_size": -1,
    "packing_format": None,
}


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        ("auto_round:auto_gptq", WordOrder.GPTQ),
        ("auto_round:auto_gptq:exllamav2", WordOrder.GPTQ),
        ("auto_round:exllamav2", WordOrder.GPTQ_V2),
        ("auto_round:auto_awq", WordOrder.AWQ),
    ],
)
def test_auto_round_by_its_first_name(backend: str, order: WordOrder) -> None:
    stated = {"quant_method": "intel/auto-round", "backend": backend, "bits": 4, "group_size": 128}
    assert read("model.layers.0.mlp.up_proj", **stated) == Form(Kind.W4A16, (1, 128), order)
    assert read("lm_head", **stated) is None


def test_auto_round_takes_the_blocks_that_it_names() -> None:
    blocks = "model.language_model.layers"
    stated = AUTO_ROUND | {"block_name_to_quantize": blocks}
    form = Form(Kind.W4A16, (1, 128), WordOrder.GPTQ)
    assert read(f"{blocks}.0.mlp.up_proj", **stated) == form
    assert read("model.visual.blocks.0.mlp.up_proj", **stated) is None


def test_auto_round_names_exceptions_or_has_patterns_of_them() -> None:
    named, pattern = {"model.layers.0.mlp.up_proj": {"bits": 8}}, {r"layers\.\d\.mlp": {"bits": 16}}
    stated = AUTO_ROUND | {"extra_config": pattern | named | {"lm_head": {"bits": 8}}}
    form = Form(Kind.W4A16, (1, 128), WordOrder.GPTQ)
    assert read("model.layers.0.mlp.up_proj", **stated) == form._replace(kind=Kind.W8A16)
    assert read("model.layers.1.mlp.up_proj", **stated) is None
    assert read("model.layers.1.self_attn.q_proj", **stated) == form


ROWS = {"num_bits": 8, "type": "float", "symmetric": True}
INPUTS = {"num_bits": 4, "type": "float", "dynamic": True}


MIXED = {"model.layers.0": {"quant_algo": "FP8"}, "model.layers.1": {"quant_algo": "W4A16_NVFP4"}}


@pytest.mark.parametrize(
    ("stated", "types"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "FP8"),
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "INT8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None),
        (AUTO_ROUND | {"act_bits": 16}, None),
        (AUTO_ROUND_FP8 | {"act_bits": 8, "packing_format": "auto_round:fp8_static"}, "FP8"),
        (compressed("mxfp4-pack-quantized", ROWS, INPUTS), "FP4"),
        (compressed("nvfp4-pack-quantized", ROWS, INPUTS), "FP4"),
        (compressed("nvfp4-pack-quantized", ROWS), None),
        (compressed("int-quantized", INT8, {"num_bits": 8, "type": "int"}), "INT8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "FP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, None),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": MIXED,
            },
            "FP8",
        ),
    ],
)
def test_what_is_dropped_of_activations_is_said(stated: dict[str, Any], types: str | None) -> None:
    quantisation = read_quantisation({"quantization_config": stated}, "llama", "bfloat16")
    assert quantisation is not None
    assert quantisation.find is not None
    assert bool(quantisation.dropped) == (types is not None)
    assert all(
        f"activations, too ({types}): `run` does not" in each for each in quantisation.dropped
    )


NULLS = (
    *("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "kv_cache_scheme"),
    *("fmt", "expert_dtype", "sparsity_config", "dynamic", "activation_scheme", "quant_algo"),
    *("desc_act", "checkpoint_format", "format", "group_size", "strategy", "actorder"),
)


@pytest.mark.parametrize("key", NULLS)
@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": None, "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        compressed("float-quantized", ROWS),
        compressed("pack-quantized", INT4 | {"group_size": 64}),
    ],
)
def test_null_says_what_leaving_a_key_out_says(stated: dict[str, Any], key: str) -> None:
    def change(stated: dict[str, Any], *, leave_out: bool) -> dict[str, Any]:
        inner = {
            k: change(v, leave_out=leave_out) for k, v in stated.items() if isinstance(v, dict)
        }
        changed = {k: v for k, v in (stated | inner).items() if k != key}
        # names of groups are no keys
        return changed if leave_out or len(inner) == len(stated) else changed | {key: None}

    null, absent = (
        read_quantisation({"quantization_config": change(stated, leave_out=out)}, "llama", None)
        for out in (False, True)
    )
    assert null is not None
    assert absent is not None
    assert null.method == absent.method
    for module in ("model.layers.0.mlp.up_proj", "lm_head"):
        assert null.stated(module) == absent.stated(module)


CONTRADICTORY = {"checkpoint_format": "gptq", "format": "gptq_v2"}


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, **CONTRADICTORY},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"},
        {"quant_method": "gptq", "bits": 5, "group_size": 128},
        {"quant_method": "awq", "bits": 3, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "backend": "llm-awq"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": 1},
        AUTO_ROUND | {"extra_config": [["lm_head"]]},
        AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 5}}},
        AUTO_ROUND | {"act_bits": 8},
        AUTO_ROUND | {"packing_format": "auto_round:mlx"},
        AUTO_ROUND | {"packing_format": "autoround:exllamav2"},
        AUTO_ROUND_FP8 | {"fmt": "e5m2"},
        AUTO_ROUND | {"modules_to_not_convert": ["self_attn"]},
        AUTO_ROUND | {"block_name_to_quantize": [["model.layers"]]},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Embedding"], "weights": INT4}},
        },
        {"bits": 4, "group_size": 64, "mode": "mxfp4"},
    ],
)
def test_what_a_known_method_may_say_and_is_not_understood(stated: dict[str, Any]) -> None:
    quantisation = read_quantisation({"quantization_config": stated}, "llama", "bfloat16")
    assert quantisation is not None
    assert quantisation.find is None
    assert quantisation.unread
