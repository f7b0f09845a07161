"""The matrices among a layer's parameters: which way round each is stored."""

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.model import Parameter

_BESIDE = ("bias", "scale", "_scales", "scale_inv", "zero_point", "qweight", "qzeros")
"""Ends of the names of what is stored beside a matrix, or (GPTQ, AWQ) beside its scales."""
_STACKED_INPUTS = ("w1", "v1")
"""Matrices of DBRX's experts, each [experts x inner, hidden], whose rows are what they give.

Source: transformers 5.23, ``DbrxExpertGLU``: the third, ``w2``, is multiplied from the other side.
"""


def output_width(parameter: Parameter, architecture: Architecture) -> int:
    """Elements that a token's product with a parameter has, one expert's where it is of experts.

    0 for what is no matrix: biases, norms, and the scales beside quantised matrices.
    """
    tensor = parameter.tensors[0]
    last, shape = parameter.name.rpartition(".")[2], tensor.shape
    if len(shape) < 2 or last.endswith(_BESIDE):
        return 0
    if last.endswith("_blocks"):  # MXFP4: [experts, out, groups, bytes]
        return shape[-3]
    if last == "scales":  # GPTQ and AWQ: [groups, out], where the matrix itself is packed
        return shape[-1]
    is_fused = parameter.is_expert and tensor.name.endswith(parameter.name)
    if not is_fused:
        return shape[-1 if architecture.matrices_in_out else -2]
    if len(shape) == 2:
        num_experts = architecture.routing.num_experts or 1
        return shape[0] // num_experts if last in _STACKED_INPUTS else shape[1]
    return shape[-1 if architecture.routing.in_out else -2]
