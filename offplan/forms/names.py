"""The names under which quantisers store a weight's parts.

Source: transformers 5.23 ``integrations`` and ``quantizers``; compressed-tensors, ``compressors``;
ModelOpt's export; bitsandbytes, ``QuantState.as_dict``; mlx-lm; torchao's flattened safetensors.
"""

from offplan.forms.form import Component

_AFTER = {
    Component.WEIGHT: "_packed _blocks",
    Component.SCALE: "_scale _scales _scale_inv .absmax",
    Component.ZERO: "_zero_point",
    Component.GROUP_INDEX: "_g_idx",
    Component.GLOBAL_SCALE: "_scale_2",
    Component.GLOBAL_DIVISOR: "_global_scale",
    Component.INPUT_SCALE: "_input_scale _activation_scale",
    Component.SHAPE: "_shape",
    Component.CODES: ".quant_map",
    Component.NESTED_SCALE: ".nested_absmax",
    Component.NESTED_CODES: ".nested_quant_map",
    Component.STATE: "_format .quant_state.bitsandbytes__nf4 .quant_state.bitsandbytes__fp4",
}
"""Ends that follow a weight's own name: ``q_proj.weight_scale``, ``gate_up_proj_blocks``."""
_INSTEAD = {
    Component.WEIGHT: ".qweight ._weight_qdata",
    Component.SCALE: ".scales .scale .SCB ._weight_scale ._weight_scale_and_zero",
    Component.ZERO: ".qzeros ._weight_zero_point",
    Component.OFFSET: ".biases",
    Component.GROUP_INDEX: ".g_idx",
    Component.INPUT_SCALE: ".input_scale .activation_scale .input_global_scale",
}
"""Ends that stand where the weight's name ends in ``.weight``: ``q_proj.qzeros``."""
_ENDS = {
    end: (part, tail)
    for ends_of, tail in ((_AFTER, ""), (_INSTEAD, ".weight"))
    for part, ends in ends_of.items()
    for end in ends.split()
}
_LONGEST_FIRST = sorted(_ENDS, key=len, reverse=True)


def part_of(name: str) -> tuple[str, Component]:
    """Tell which weight a tensor of this name may belong to, and what it would be to it.

    ``q_proj.qzeros`` gives ``q_proj.weight`` and its ZERO. It is only a name: whether it belongs
    there is for the weight's type to say.
    """
    for end in _LONGEST_FIRST:
        if name.endswith(end):
            part, tail = _ENDS[end]
            return name.removesuffix(end) + tail, part
    return name, Component.WEIGHT
