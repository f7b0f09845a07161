"""The names under which quantisers store a weight's parts.

Source: transformers 5.23 ``integrations`` and ``quantizers``; compressed-tensors, ``compressors``;
ModelOpt's export; bitsandbytes, ``QuantState.as_dict``; mlx-lm; torchao's flattened safetensors.
"""

from offplan.forms.form import Part

_AFTER = {
    Part.WEIGHT: "_packed _blocks",
    Part.SCALE: "_scale _scales _scale_inv .absmax",
    Part.ZERO: "_zero_point",
    Part.GROUP_INDEX: "_g_idx",
    Part.GLOBAL_SCALE: "_scale_2",
    Part.GLOBAL_DIVISOR: "_global_scale",
    Part.INPUT_SCALE: "_input_scale _activation_scale",
    Part.SHAPE: "_shape",
    Part.CODES: ".quant_map",
    Part.NESTED_SCALE: ".nested_absmax",
    Part.NESTED_CODES: ".nested_quant_map",
    Part.STATE: "_format .quant_state.bitsandbytes__nf4 .quant_state.bitsandbytes__fp4",
}
"""Ends that follow a weight's own name: ``q_proj.weight_scale``, ``gate_up_proj_blocks``."""
_INSTEAD = {
    Part.WEIGHT: ".qweight ._weight_qdata",
    Part.SCALE: ".scales .scale .SCB ._weight_scale ._weight_scale_and_zero",
    Part.ZERO: ".qzeros ._weight_zero_point",
    Part.OFFSET: ".biases",
    Part.GROUP_INDEX: ".g_idx",
    Part.INPUT_SCALE: ".input_scale .activation_scale .input_global_scale",
}
"""Ends that stand where the weight's name ends in ``.weight``: ``q_proj.qzeros``."""
_ENDS = {
    end: (part, tail)
    for ends_of, tail in ((_AFTER, ""), (_INSTEAD, ".weight"))
    for part, ends in ends_of.items()
    for end in ends.split()
}
_LONGEST_FIRST = sorted(_ENDS, key=len, reverse=True)


def part_of(name: str) -> tuple[str, Part]:
    """Tell which weight a tensor of this name may belong to, and what it would be to it.

    ``q_proj.qzeros`` gives ``q_proj.weight`` and its ZERO. It is only a name: whether it belongs
    there is for the weight's type to say.
    """
    for end in _LONGEST_FIRST:
        if name.endswith(end):
            part, tail = _ENDS[end]
            return name.removesuffix(end) + tail, part
    return name, Part.WEIGHT
