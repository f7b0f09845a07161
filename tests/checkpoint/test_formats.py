"""Quantised checkpoints, written to files as their tools write them, and read back."""

import pytest
from safetensors import safe_open

from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import DTYPE_BITS
from tests.checkpoint.files import DENSE_CONFIG, write_folder

ROWS, COLUMNS = 256, 512
GROUPS = COLUMNS // 128
WEIGHT = ROWS * COLUMNS
FORMATS = {
    "fp8 blocks": {
        "weight": ("F8_E4M3", (ROWS, COLUMNS)),
        "weight_scale_inv": ("F32", (ROWS // 128, GROUPS)),
    },
    "fp8 tensor": {
        "weight": ("F8_E4M3", (ROWS, COLUMNS)),
        "weight_scale": ("BF16", (1,)),
        "input_scale": ("BF16", (1,)),
    },
    "gptq": {
        "qweight": ("I32", (COLUMNS // 8, ROWS)),
        "qzeros": ("I32", (GROUPS, ROWS // 8)),
        "scales": ("F16", (GROUPS, ROWS)),
        "g_idx": ("I32", (COLUMNS,)),
    },
    "awq": {
        "qweight": ("I32", (COLUMNS, ROWS // 8)),
        "qzeros": ("I32", (GROUPS, ROWS // 8)),
        "scales": ("F16", (GROUPS, ROWS)),
    },
    "compressed-tensors int4": {
        "weight_packed": ("I32", (ROWS, COLUMNS // 8)),
        "weight_scale": ("BF16", (ROWS, GROUPS)),
        "weight_zero_point": ("I32", (ROWS // 8, GROUPS)),
        "weight_shape": ("I64", (2,)),
        "weight_g_idx": ("I32", (COLUMNS,)),
    },
    "compressed-tensors nvfp4": {
        "weight_packed": ("U8", (ROWS, COLUMNS // 2)),
        "weight_scale": ("F8_E4M3", (ROWS, COLUMNS // 16)),
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    },
    "modelopt nvfp4": {
        "weight": ("U8", (ROWS, COLUMNS // 2)),
        "weight_scale": ("F8_E4M3", (ROWS, COLUMNS // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    },
    "packed fp4": {"weight": ("F4", (ROWS, COLUMNS)), "scale": ("F8_E8M0", (ROWS, COLUMNS // 32))},
    "bitsandbytes nf4": {
        "weight": ("U8", (WEIGHT // 2, 1)),
        "weight.absmax": ("U8", (WEIGHT // 64,)),
        "weight.nested_absmax": ("F32", (WEIGHT // 64 // 256,)),
        "weight.nested_quant_map": ("F32", (256,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (111,)),
    },
    "bitsandbytes int8": {
        "weight": ("I8", (ROWS, COLUMNS)),
        "SCB": ("F32", (ROWS,)),
        "weight_format": ("U8", ()),
    },
}
CONFIG = {**DENSE_CONFIG, "num_experts": 2, "num_experts_per_tok": 1}
PROJECTIONS = ("self_attn.k_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj")


def num_bytes(tensors):
    sizes = (bits_of(dtype, shape) for dtype, shape in tensors.values())
    return sum(sizes) // 8


def bits_of(dtype, shape):
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return bits


@pytest.mark.parametrize("name", FORMATS)
def test_companions_are_grouped_with_their_weight(tmp_path, name):
    parts = FORMATS[name]
    shapes = {
        f"model.layers.{index}.{projection}.{part}": shape
        for index in range(2)
        for projection in PROJECTIONS
        for part, shape in parts.items()
    }
    folder = write_folder(tmp_path, CONFIG, {"model.safetensors": shapes})
    model = open_model(str(folder))
    each = num_bytes(parts)
    assert model.layers[1].segments == {"self_attn.k_proj": each, "mlp.experts.up_proj": 2 * each}
    assert model.total_bytes == model.loaded_bytes == 6 * each
    assert model.experts.bytes_per_expert == each
    # The cache is the config's: packed shapes say nothing of heads, whole ones (1 byte) do.
    whole = name.startswith("fp8")
    assert model.layers[0].kv_cache == KVCache(2 * ROWS * 2 if whole else 2 * 1 * 4 * 2)
    assert any("packed" in note for note in model.notes) == (
        name not in ("fp8 blocks", "fp8 tensor", "packed fp4", "bitsandbytes int8")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_valid_to_safetensors(tmp_path, name):
    folder = write_folder(tmp_path, CONFIG, {"model.safetensors": FORMATS[name]})
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    expected = {key: shape for key, (_, shape) in FORMATS[name].items()}
    # An F4 tensor is opened as pairs of elements.
    assert found == expected or name == "packed fp4"


def test_every_dtype_of_safetensors_is_counted(tmp_path):
    shapes = {f"model.layers.0.a{dtype}.weight": (dtype, (8, 4)) for dtype in DTYPE_BITS}
    config = {"model_type": "llama", "num_hidden_layers": 1}
    folder = write_folder(tmp_path, config, {"model.safetensors": shapes})
    model = open_model(str(folder))
    assert model.num_parameters == 32 * len(DTYPE_BITS)
    assert model.total_bytes == sum(4 * bits for bits in DTYPE_BITS.values())
    with safe_open(folder / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(shapes)
