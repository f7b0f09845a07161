"""The part that a parameter plays in its layer."""

import pytest

from offplan.checkpoint.parameter import Parameter, Role, role_of
from offplan.checkpoint.tensors import TensorInfo


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("self_attn.q_proj.weight", Role.QKV),
        ("self_attn.q_norm.weight", Role.OTHER),
        ("self_attn.o_proj.weight", Role.ATTENTION_OUTPUT),
        ("input_layernorm.weight", Role.OTHER),
        ("attn.c_attn.weight", Role.QKV),
        ("attn.c_proj.weight", Role.ATTENTION_OUTPUT),
        ("mlp.c_fc.weight", Role.GATE_UP),
        ("mlp.c_proj.weight", Role.DOWN),
        ("self_attention.query_key_value.weight", Role.QKV),
        ("self_attention.dense.weight", Role.ATTENTION_OUTPUT),
        ("mlp.dense_h_to_4h.weight", Role.GATE_UP),
        ("mlp.dense_4h_to_h.weight", Role.DOWN),
        ("norm_attn_norm.attn.Wqkv.weight", Role.QKV),
        ("norm_attn_norm.attn.out_proj.weight", Role.ATTENTION_OUTPUT),
        ("norm_attn_norm.norm_1.weight", Role.OTHER),
        ("mlp.shared_experts.up_proj.weight", Role.SHARED_EXPERTS),
        ("mlp.gate.weight", Role.OTHER),
    ],
)
def test_role(name: str, role: Role) -> None:
    assert role_of(Parameter(name, (TensorInfo(name, "BF16", (8, 8)),))) is role
