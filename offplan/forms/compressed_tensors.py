"""The ``quantization_config`` of compressed-tensors.

Source: compressed-tensors 0.15, ``QuantizationConfig``, ``apply_quantization_config`` and
``match_targets``.
"""

from collections.abc import Mapping
from typing import Any

from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.forms.matching import block_of, grouped_form, is_record, is_size, names_of, targets
from offplan.forms.quantisation import Quantisation, Scheme, note_scales


def read_compressed_tensors(stated: Mapping[str, Any], float_type: str) -> Quantisation:
    """Read it; scales are of ``float_type``, the model's own, as safetensors names it."""
    groups, sparsity = stated.get("config_groups"), stated.get("sparsity_config")
    is_sparse = is_record(sparsity) and sparsity.get("format", "dense") != "dense"
    if is_sparse:
        unread = {"sparsity_config": sparsity}
        return Quantisation("compressed-tensors", is_known=False, unread=unread)
    if not is_record(groups):
        return Quantisation("compressed-tensors", unread={"config_groups": groups})
    found: dict[str, Scheme] = {}
    inputs: set[str] = set()
    for each in groups.values():
        group = each if is_record(each) else {}
        scheme = _read_group(group, stated.get("format"), float_type)
        meant = names_of(group.get("targets"))
        # a target without a dot is the name of a class, of which only one is known here
        is_known = all("." in name or name == "Linear" for name in meant)
        if scheme is None or not is_known:
            layout = group.get("format", stated.get("format"))
            said = {"format": layout, "weights": group.get("weights")}
            unread = said if is_known else {"targets": group["targets"]}
            return Quantisation("compressed-tensors", unread=unread)
        found |= dict.fromkeys(meant, scheme)
        inputs |= _name_inputs(group.get("input_activations"))
    ignored = names_of(stated.get("ignore"))
    # names go before patterns, in the order of their letters, and these before the class
    narrowest = sorted(found, key=lambda name: (name == "Linear", name.startswith("re:"), name))

    def find(module: str) -> Scheme | None:
        if targets(ignored, module):
            return None
        return next((found[name] for name in narrowest if targets((name,), module)), None)

    activations = tuple(sorted(inputs))
    note = note_scales(float_type)
    return Quantisation("compressed-tensors", find, activations=activations, note=note)


def _name_inputs(stated: Any) -> set[str]:
    """Name what a group's inputs are rounded to: FP8, FP4, INT8; nothing where they are not."""
    bits = stated.get("num_bits", 8) if is_record(stated) else 16
    if not is_record(stated) or not is_size(bits) or bits >= 16:
        return set()
    return {f"{'FP' if stated.get('type') == 'float' else 'INT'}{bits}"}


def _read_group(group: Mapping[str, Any], layout: Any, scale: str) -> Scheme | None:
    """Return the scheme of one group; None where it is not known."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    layout = group.get("format") or layout
    if not is_record(weights):
        return None
    form = _read_form(weights, layout)
    if form is OTHER:
        return None
    in_words = form.word_order is WordOrder.COMPRESSED_TENSORS
    is_shuffled = str(weights.get("actorder")).lower() in ("group", "true")
    is_static = is_record(inputs) and inputs.get("dynamic") is False
    choices = {
        Component.ZERO: weights.get("symmetric") is False and form.word_order is not None,
        Component.GROUP_INDEX: is_shuffled and form.word_order is not None,
        Component.INPUT_SCALE: is_static or (form.kind is Kind.NVFP4 and is_record(inputs)),
    }
    kind = "packed" if in_words else form.kind.value
    scale = "U8" if layout == "mxfp8-quantized" else scale
    return Scheme(form, f"compressed-tensors {kind}", scale, choices)


def _read_form(weights: Mapping[str, Any], layout: Any) -> Form:
    """Return the form of a group's weights; OTHER where it is not known."""
    bits, number = weights.get("num_bits", 8), weights.get("type", "int")
    group = weights.get("group_size", -1)
    usual = "tensor" if "group_size" not in weights else "channel" if group == -1 else "group"
    strategy = weights.get("strategy", usual)
    if layout == "nvfp4-pack-quantized":
        return Form(Kind.NVFP4, (1, 16))
    if layout == "mxfp4-pack-quantized":
        return Form(Kind.MXFP4, (1, 32))
    if layout == "mxfp8-quantized":
        return Form(Kind.FP8_BLOCK, (1, 32))
    if layout in ("float-quantized", "naive-quantized") and weights.get("symmetric") is not False:
        block = block_of(weights.get("block_structure"))
        if (bits, number) != (8, "float"):
            return OTHER
        if strategy == "block" and block is not None:
            return Form(Kind.FP8_BLOCK, block)
        if strategy in ("channel", "tensor"):
            return Form(Kind(f"fp8_{strategy}"))
    elif number == "int" and strategy in ("group", "channel"):
        group = group if strategy == "group" else -1
        if layout == "pack-quantized":
            return grouped_form(bits, group, WordOrder.COMPRESSED_TENSORS)
        if layout == "int-quantized" and bits == 8:
            return grouped_form(bits, group, WordOrder.NONE)
    return OTHER
