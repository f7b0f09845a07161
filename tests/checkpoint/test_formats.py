"""Quantised checkpoints, written to files as their tools write them, and read back."""

import pytest
from safetensors import safe_open

from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import DTYPE_BITS
from offplan.forms.form import Kind
from tests.checkpoint.files import write_folder
from tests.checkpoint.quantised import (
    ATTENTION,
    FORMATS,
    NUM_WEIGHTS,
    ROUTED,
    num_bytes,
    shapes_of,
    write_quantised,
)


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


@pytest.mark.parametrize("name", FORMATS)
def test_figures_of_the_model_are_those_of_what_it_stands_for(tmp_path, name):
    format = FORMATS[name]
    model = open_model(str(write_quantised(tmp_path, format)))
    assert model.num_parameters == NUM_WEIGHTS
    assert model.total_bytes == model.loaded_bytes == num_bytes(shapes_of(format))
    assert model.dtype == "bfloat16"
    assert {layer.kv_cache for layer in model.layers} == {KVCache(2 * 2 * 64 * 2)}
    assert model.head.shape == (64, 256)
    assert (model.input_embedding is None) == format.takes_all


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
