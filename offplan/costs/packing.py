"""Costs of weights that are held packed, beyond those of their values."""

from collections.abc import Sequence
from itertools import pairwise

from offplan.checkpoint.parameter import Parameter
from offplan.costs.work import LayerWork, PassShape
from offplan.kernel_sizes import PACKED_ROWS

PACKED_SLOWDOWNS = ((1, 1.04), (4, 1.05), (16, 1.11), (32, 1.23), (64, 1.60), (128, 2.73))
"""Time of products with packed weights as a multiple of that with their values, by inputs of a
weight. It is for a machine whose profile has no times of packed layers.

Source: the products of a layer of Qwen3-8B on an H200 (``results/packed-rows-h200.json``). By 4
inputs and more they took 114, 119, 134, 176 and 321 us packed, and 107 to 117 us by cuBLAS from
values. Products by one input took 122 and 117. Up to 64 inputs, an H100 takes 0.90 to 0.92 of the
packed times since (``results/packed-rows-h100.json``).
"""
PACKED_EXPERT_SLOWDOWNS = ((1, 1.04), (2, 1.44), (16, 1.61), (32, 1.68), (64, 2.51), (128, 3.57))
"""PACKED_SLOWDOWNS of experts, by inputs of an expert on average.

Source: dense products by an earlier kernel. A prompt of 512 tokens of DeepSeek-V2-Lite has 48
inputs an expert. It is so predicted to take 161 ms on an H200, where vLLM took 173.
"""

EXPANSION_SLOWDOWN = 1.3
"""Time of expanding packed weights as a multiple of that of their bytes, read and written.

Source: 12,288 x 4,096 took 49 us on an H200 and its bytes 44; smaller matrices took longer.
"""


def packed_slowdown(
    num_inputs: float, slowdowns: Sequence[tuple[int, float]] = PACKED_SLOWDOWNS
) -> float:
    """Time of a product with packed weights as a multiple of that with values."""
    most, slowest = slowdowns[-1]
    for (few, fast), (many, slow) in pairwise(slowdowns):
        if num_inputs <= many:
            return fast + max(0.0, num_inputs - few) / (many - few) * (slow - fast)
    return slowest * num_inputs / most


def layer_bytes(work: LayerWork, shape: PassShape) -> float:
    """Bytes to and from GPU memory that are as long on their way as packing makes a layer's pass.

    Products of few tokens take PACKED_SLOWDOWNS times as long as their values. For many tokens,
    dense weights are read packed and their values written before they are multiplied.
    """
    plain, of_all = work.stored, work.experts
    assert plain is not None, "the layer is packed"
    num_tokens, of_expert = shape.num_tokens, 0.0
    if of_all is not None:
        of_expert = num_tokens * of_all.num_experts_per_token / of_all.num_in_all
    experts = plain.weight_bytes(shape) - plain.dense_bytes
    longer = (packed_slowdown(of_expert, PACKED_EXPERT_SLOWDOWNS) - 1) * experts
    if num_tokens <= PACKED_ROWS:
        return longer + (packed_slowdown(num_tokens) - 1) * plain.dense_bytes
    expanded = work.dense_bytes + work.element_bytes * work.expanded_elements
    return longer + EXPANSION_SLOWDOWN * expanded


def head_bytes(head: Parameter, shape: PassShape) -> int:
    """Bytes that a pass takes as long to read of a packed head whose values it does not make."""
    return round(packed_slowdown(shape.head_rows) * head.as_stored.nbytes)
