"""The ``quantization_config`` of compressed-tensors.

Source: compressed-tensors 0.15, ``QuantizationConfig``, ``apply_quantization_config`` and
``match_targets``.
"""

from collections.abc import Mapping
from typing import Any

from offplan.forms.form import OTHER, Form, Kind, WordOrder
from offplan.forms.matching import targets
from offplan.forms.quantisation import Quantisation, note_scales
from offplan.forms.scheme import Scheme, store_bytes, store_fp4, store_packed
from offplan.forms.stated import grouped_form, is_record, is_size, names_of


def read_compressed_tensors(stated: Mapping[str, Any], float_type: str) -> Quantisation:
    """Read it; scales are of ``float_type``, the model's own, as safetensors names it."""
    groups, sparsity = stated.get("config_groups"), stated.get("sparsity_config")
    is_sparse = is_record(sparsity) and sparsity.get("format", "dense") != "dense"
    if is_sparse:
        return Quantisation("compressed-tensors", is_known=False)
    if not is_record(groups):
        return Quantisation("compressed-tensors")
    found: dict[str, Scheme] = {}
    for group in groups.values():
        scheme = _read_group(group, stated.get("format"), float_type) if is_record(group) else None
        meant = names_of(group.get("targets")) if is_record(group) else ()
        # a target without a dot is the name of a class, of which only one is known here
        if scheme is None or any("." not in name and name != "Linear" for name in meant):
            return Quantisation("compressed-tensors")
        found |= dict.fromkeys(meant, scheme)
    ignored = names_of(stated.get("ignore"))
    # names go before patterns, in the order of their letters, and these before the class
    narrowest = sorted(found, key=lambda name: (name == "Linear", name.startswith("re:"), name))

    def find(module: str) -> Scheme | None:
        if targets(ignored, module):
            return None
        return next((found[name] for name in narrowest if targets((name,), module)), None)

    return Quantisation("compressed-tensors", find, note=note_scales(float_type))


def _read_group(group: Mapping[str, Any], layout: Any, scale: str) -> Scheme | None:
    """Return the scheme of one group; None where it is not known."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    layout = group.get("format") or layout
    if not is_record(weights):
        return None
    is_static = is_record(inputs) and inputs.get("dynamic") is False
    if layout == "nvfp4-pack-quantized":
        return Scheme(Form(Kind.NVFP4, (1, 16)), store_fp4, has_input_scale=is_record(inputs))
    if layout == "mxfp4-pack-quantized":
        return Scheme(Form(Kind.MXFP4, (1, 32)), store_fp4)
    has_zeros = weights.get("symmetric") is False
    if layout in ("float-quantized", "naive-quantized") and not has_zeros:
        form = _fp8_form(weights)
        return form and Scheme(form, store_bytes, scale=scale, has_input_scale=is_static)
    orders = {"pack-quantized": WordOrder.COMPRESSED_TENSORS, "int-quantized": WordOrder.NONE}
    form = _whole_form(weights, orders.get(layout) if isinstance(layout, str) else None)
    if form is None or (form.word_order is WordOrder.NONE and form.kind is not Kind.W8A16):
        return None
    return Scheme(
        form,
        store_packed if form.word_order is WordOrder.COMPRESSED_TENSORS else store_bytes,
        scale=scale,
        has_zeros=has_zeros,
        has_group_index=str(weights.get("actorder")).lower() in ("group", "true"),
        has_input_scale=is_static,
    )


def _fp8_form(weights: Mapping[str, Any]) -> Form | None:
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return None
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return Form(Kind.FP8_BLOCK, (block[0], block[1])) if all(map(is_size, block)) else None
    kinds = {"channel": Kind.FP8_CHANNEL, "tensor": Kind.FP8_TENSOR}
    return Form(kinds[strategy]) if isinstance(strategy, str) and strategy in kinds else None


def _whole_form(weights: Mapping[str, Any], order: WordOrder | None) -> Form | None:
    strategy = weights.get("strategy")
    if weights.get("type") != "int" or strategy not in ("group", "channel"):
        return None
    group = weights.get("group_size") if strategy == "group" else -1
    form = grouped_form(weights.get("num_bits"), group, order)
    return None if form is OTHER else form
