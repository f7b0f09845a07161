"""How wide a product is, by the way round its matrix is stored."""

import pytest

from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.layers import output_width
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.forms.form import Form, Kind

LLAMA = {"model_type": "llama"}
GPT2 = {"model_type": "gpt2"}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32}
DBRX = {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 4}}


@pytest.mark.parametrize(
    ("config", "name", "shape", "width"),
    [
        (LLAMA, "mlp.up_proj.weight", (48, 32), 48),
        (LLAMA, "mlp.up_proj.bias", (48,), 0),
        (LLAMA, "mlp.up_proj.weight_scale_inv", (48, 32), 0),
        (GPT2, "attn.c_attn.weight", (32, 96), 96),
        (GPT2, "attn.c_proj.weight", (32, 32), 32),
        (GPT2, "mlp.c_fc.weight", (32, 128), 128),
        (GPT2, "mlp.c_proj.weight", (128, 32), 32),
        (GPT_OSS, "self_attn.q_proj.weight", (64, 32), 64),
        (GPT_OSS, "mlp.experts.gate_up_proj", (32, 16, 48), 48),
        (GPT_OSS, "mlp.experts.gate_up_proj_bias", (32, 48), 0),
        ({"model_type": "granitemoe"}, "moe.experts.input_linear.weight", (4, 48, 32), 48),
        (DBRX, "ffn.experts.mlp.w1", (4 * 24, 32), 24),
        (DBRX, "ffn.experts.mlp.v1", (4 * 24, 32), 24),
        (DBRX, "ffn.experts.mlp.w2", (4 * 24, 32), 32),
    ],
)
def test_width(config, name, shape, width):
    parameter = Parameter(name, (TensorInfo(f"h.0.{name}", "BF16", shape),), "experts" in name)
    assert output_width(parameter, read_architecture(config)) == width


def test_width_of_one_of_the_experts_stored_one_by_one():
    name = "mlp.experts.{}up_proj.weight"
    tensors = (TensorInfo(f"h.0.{name.format(f'{e}.')}", "BF16", (48, 32)) for e in range(4))
    parameter = Parameter(name.format(""), tuple(tensors), is_expert=True)
    assert output_width(parameter, read_architecture({"model_type": "gpt_oss"})) == 48


def test_width_of_a_matrix_in_another_form_is_that_it_stands_for():
    stored = TensorInfo("h.0.mlp.experts.gate_up_proj_blocks", "U8", (32, 48, 90, 16))
    form, shape = Form(Kind.MXFP4, (1, 32)), (32, 48, 2880)
    name = "mlp.experts.gate_up_proj"
    parameter = Parameter(name, (stored,), is_expert=True, form=form, logical_shape=shape)
    assert output_width(parameter, read_architecture(GPT_OSS)) == 48
