"""The ``quantization_config`` of AutoRound's own files.

Source: AutoRound 0.16, ``AutoRoundFormat`` and ``dynamic_import_quant_linear_for_packing``, and
what it wrote of a tiny Qwen3 in each of these ways; of ``backend``, AutoRound 0.4 and 0.5.
"""

import re
from collections.abc import Mapping
from typing import Any

from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.forms.matching import (
    IN_STACK,
    compile_pattern,
    is_record,
    is_size,
    names_of,
    read_words,
)
from offplan.forms.quantisation import Quantisation, Scheme, leave_unread, note_scales

_NAME = re.compile(r"[\w.]+\.\d+\.[\w.]+")
"""Tells names of modules from patterns, where a key may be either."""
_WAY = ("packing_format", "backend", "data_type", "bits", "group_size")
"""Keys that say together what is stored of a layer."""
_OTHER_LAYERS = (
    *("quant_lm_head", "dynamic", "modules_in_block_to_quantize", "modules_to_not_convert"),
    *("ignored_layers", "weight_block_size"),
)
"""Keys by which it takes other layers than all of its blocks, or blocks of a layer."""
_WORDS = {
    **dict.fromkeys(("auto_gptq", "gptq"), (WordOrder.GPTQ, "auto-round gptq")),
    **dict.fromkeys(("auto_awq", "awq"), (WordOrder.AWQ, "awq")),
    "gptqmodel": (WordOrder.GPTQ_V2, "gptq"),
    **dict.fromkeys(("", "exllamav2", "tritonv2"), (WordOrder.GPTQ_V2, "auto-round gptq")),
}
"""The order of words and the layout by the second part of the packing format: ``auto_gptq``."""
_FLOATS: dict[tuple[Any, ...], tuple[Form, str]] = {
    ("llm_compressor", "mx_fp", 4, 32): (Form(Kind.MXFP4, (1, 32)), "compressed-tensors mxfp4"),
    ("llm_compressor", "mx_fp", 8, 32): (Form(Kind.FP8_BLOCK, (1, 32)), "modelopt fp8_block"),
    ("llm_compressor", "nv_fp", 4, 16): (Form(Kind.NVFP4, (1, 16)), "compressed-tensors nvfp4"),
    ("fp8_static", "fp", 8, -1): (Form(Kind.FP8_CHANNEL), "auto-round fp8_channel"),
    ("fp8_static", "fp", 8, 0): (Form(Kind.FP8_TENSOR), "compressed-tensors fp8_tensor"),
    ("", "fp", 8, -1): (Form(Kind.FP8_CHANNEL), "auto-round fp8_channel"),
    ("", "fp", 8, 0): (Form(Kind.FP8_TENSOR), "compressed-tensors fp8_tensor"),
}
"""Forms and layouts of floats, by the packing format's second part, type, bits and group."""


_UNREAD = Scheme(OTHER, "")


def read_auto_round(stated: Mapping[str, Any], float_type: str) -> Quantisation:
    """Read it; FP8's scales are of ``float_type``, the model's own, as safetensors names it."""
    own = stated.get("extra_config") or {}
    blocks = stated.get("block_name_to_quantize") or stated.get("to_quant_block_names") or ""
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else names_of(blocks)
    said = own if is_record(own) else {}
    named = {
        name: _read_scheme({**stated, **more}, float_type)
        for name, more in said.items()
        if is_record(more) and more
    }
    usual = _read_scheme(stated, float_type)
    refused = leave_unread(
        "auto-round",
        stated,
        **dict.fromkeys(
            (key for key in _WAY if key in stated or key == "bits"),
            usual is not None and usual is not _UNREAD,
        ),
        fmt=stated.get("fmt", "e4m3") == "e4m3",
        block_name_to_quantize=bool(blocks),
        extra_config=is_record(own) and _UNREAD not in named.values(),
        **{key: not stated.get(key) for key in _OTHER_LAYERS},
    )
    if refused:
        return refused
    patterns = [name for name in named if not _NAME.fullmatch(name)]

    def find(module: str) -> Scheme | None:
        if not module.startswith(blocks) or not IN_STACK.search(module):
            return None
        if module in named:
            return named[module]
        meant = (named[each] for each in patterns if compile_pattern(each).search(module))
        return next(meant, usual)

    assert usual is not None
    scale = usual.scale
    bits = stated.get("act_bits")
    inputs = (f"FP{bits}",) if is_size(bits) and bits < 16 else ()
    return Quantisation("auto-round", find, activations=inputs, note=note_scales(scale))


def _read_scheme(said: Mapping[str, Any], float_type: str) -> Scheme | None:
    """Return how a layer is stored; None for one that is left as it is."""
    bits, group, inputs = (said.get(key) for key in ("bits", "group_size", "act_bits"))
    if type(bits) is int and bits >= 16:
        return None
    tool, _, way = str(said.get("packing_format", said.get("backend", "auto_round:"))).partition(
        ":"
    )
    if tool != "auto_round":
        return _UNREAD
    way = way.removesuffix(":exllamav2").removesuffix(":tritonv2")
    kind = said.get("data_type", "int")
    if kind == "int":
        if way not in _WORDS or (is_size(inputs) and inputs < 16):
            return _UNREAD
        return read_words(bits, group, *_WORDS[way]) or _UNREAD
    if not all(isinstance(each, (str, int)) for each in (kind, bits, group)):
        return _UNREAD
    form, layout = _FLOATS.get((way, kind, bits, group), (OTHER, ""))
    is_static = way == "fp8_static" or (form.kind is Kind.NVFP4 and bool(inputs))
    return (
        Scheme(form, layout, float_type, {Component.INPUT_SCALE: is_static}) if layout else _UNREAD
    )
