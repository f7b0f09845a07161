"""The matrices among a layer's parameters: which way round each is stored."""

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.parameter import Parameter

_BESIDE = ("bias", "scale", "scales", "scale_inv")
"""Ends of the names of what is stored beside a matrix."""
_STACKED_INPUTS = ("w1", "v1")
"""Matrices of DBRX's experts, each [experts x inner, hidden], whose rows are what they give.

Source: transformers 5.23, ``DbrxExpertGLU``: the third, ``w2``, is multiplied from the other side.
"""


def output_width(parameter: Parameter, architecture: Architecture) -> int:
    """Elements that a token's product with a parameter has, one expert's where it is of experts.

    0 for what is no matrix: biases, norms, and what was left of a quantiser's.
    """
    last, shape = parameter.name.rpartition(".")[2], parameter.shape
    if len(shape) < 2 or last.endswith(_BESIDE):
        return 0
    if shape != parameter.tensors[0].shape:  # of packed ones, [..., out, in] is known
        return shape[-2]
    if not parameter.is_fused:
        return shape[-1 if architecture.matrices_in_out else -2]
    if len(shape) == 2:
        num_experts = architecture.routing.num_experts or 1
        return shape[0] // num_experts if last in _STACKED_INPUTS else shape[1]
    return shape[-1 if architecture.routing.in_out else -2]
