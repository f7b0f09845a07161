"""The part that a parameter plays in its layer: what engines fuse plays one part."""

from enum import Enum

from offplan.checkpoint.parameter import Parameter

ATTENTION_OUTPUTS = frozenset({"o_proj", "out_proj", "wo", "dense", "c_proj"})
"""Modules of attention that give hidden states."""
MLP_OUTPUTS = frozenset({"down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "fc_out"})
"""Modules of an MLP that give hidden states."""
_MLP_INPUTS = frozenset(
    {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc", "dense_h_to_4h", "fc_in"}
)


class Role(str, Enum):
    """Parameters of one role are fused, or used together, by every engine.

    Source: vLLM's ``qkv_proj``, ``gate_up_proj``, ``w13_weight`` and ``w2_weight``.
    """

    QKV = "attention inputs"
    ATTENTION_OUTPUT = "attention output"
    GATE_UP = "MLP inputs"
    DOWN = "MLP output"
    EXPERTS_GATE_UP = "expert inputs"
    EXPERTS_DOWN = "expert outputs"
    SHARED_EXPERTS = "shared experts"
    OTHER = "norms, router and the like"


def role_of(parameter: Parameter) -> Role:
    """Tell a parameter's role by its name; what is not recognised is OTHER."""
    parts = parameter.name.split(".")
    if parameter.is_expert:
        # fused experts join what it is to the projection's name: down_proj_bias, w2_weight
        is_output = any(part.startswith(tuple(MLP_OUTPUTS)) for part in parts)
        return Role.EXPERTS_DOWN if is_output else Role.EXPERTS_GATE_UP
    # not all parts: DBRX has its attention in ``norm_attn_norm``
    if "norm" in parameter.segment.rpartition(".")[2]:
        return Role.OTHER
    if any(part.startswith("shared_expert") for part in parts):
        return Role.SHARED_EXPERTS
    if "attn" in parts[0] or "attention" in parts[0]:
        is_output = not ATTENTION_OUTPUTS.isdisjoint(parts)
        return Role.ATTENTION_OUTPUT if is_output else Role.QKV
    if not MLP_OUTPUTS.isdisjoint(parts):
        return Role.DOWN
    if not _MLP_INPUTS.isdisjoint(parts):
        return Role.GATE_UP
    return Role.OTHER
