"""The ``quantization_config`` of each method that quantises.

Source: transformers 5.23, ``utils.quantization_config`` and ``quantizers``; ModelOpt's
``hf_quant_config.json``; mlx-lm, ``utils.save_config``.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offplan.forms.compressed_tensors import read_compressed_tensors
from offplan.forms.form import OTHER, Form, Kind, Part, WordOrder
from offplan.forms.matching import has_run, matches_wildcard, skips, targets
from offplan.forms.quantisation import Quantisation, note_scales
from offplan.forms.scheme import BNB4_STATE_BYTES, Scheme
from offplan.forms.stated import block_of, grouped_form, is_record, names_of

_IN_STACK = re.compile(r"\.\d+\.")
"""Tells the modules of a stack of layers from those outside, such as the head."""
_UNHEEDED = ("rotation", "transform_config", "adapter")
"""What a config may say beyond how weights are stored: that activations are turned to meet weights
that were, and that an adapter corrects the error. Source: GPTQModel, ``QuantizeConfig``;
compressed-tensors, ``TransformConfig``."""


class _Model(NamedTuple):
    """What quantisers' defaults depend on."""

    model_type: str
    float_type: str
    """Safetensors' name of the type that scales have where it is the model's own."""


def read_quantisation(
    config: Mapping[str, Any], model_type: str, dtype: str | None
) -> Quantisation | None:
    """Read how a model is quantised; None where its config says nothing of it."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        stated = config.get("quantization")  # mlx-lm's own key
        if not isinstance(stated, Mapping) or "group_size" not in stated:
            return None
    if not isinstance(stated, Mapping):
        return Quantisation("unknown", is_known=False)
    model = _Model(model_type, "F16" if dtype == "float16" else "BF16")
    method = _name_method(stated)
    read = _READERS.get(method)
    if read is None or any(stated.get(key) for key in _UNHEEDED):
        return Quantisation(method, is_known=False)
    return read(stated, model)


def _name_method(stated: Mapping[str, Any]) -> str:
    """Return the ``quant_method``, which mlx-lm and old files of compressed-tensors do not name."""
    if "quant_method" in stated:
        method = str(stated["quant_method"]).lower()
        return "modelopt" if method.startswith("modelopt") else method
    if "config_groups" in stated:
        return "compressed-tensors"
    return "mlx" if "group_size" in stated and "bits" in stated else "unknown"


def _read_fp8(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    # what transformers takes for an absent one; null is one scale a matrix
    size = stated.get("weight_block_size", [128, 128])
    block = block_of(size)
    is_usual = stated.get("expert_dtype", "fp8") == "fp8" and stated.get("fmt", "e4m3") == "e4m3"
    if (size is not None and block is None) or not is_usual or stated.get("modules_to_convert"):
        return Quantisation("fp8")
    form = Form(Kind.FP8_TENSOR if block is None else Kind.FP8_BLOCK, block)
    # DeepSeek and most others store them in float32; Qwen does not, nor does Mistral one a matrix
    scale = "BF16" if model.model_type.startswith("qwen") or block is None else "F32"
    is_static = stated.get("activation_scheme") == "static"
    scheme = Scheme(form, f"fp8 {form.kind.value}", scale, {Part.INPUT_SCALE: is_static})
    skipped = stated.get("modules_to_not_convert", stated.get("ignored_layers"))
    return Quantisation(
        "fp8", _all_but(skipped, scheme), skips_head=skipped is None, note=note_scales(scale)
    )


def _read_mxfp4(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    scheme = Scheme(Form(Kind.MXFP4, (1, 32)), "compressed-tensors mxfp4")
    find = _all_but(stated.get("modules_to_not_convert"), scheme)
    return Quantisation("mxfp4", find, takes_experts_alone=True)


def _read_bitsandbytes(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    note = None
    in_bytes = stated.get("bnb_4bit_quant_storage", "uint8") == "uint8"
    if stated.get("load_in_8bit") is True or stated.get("_load_in_8bit") is True:
        scheme = Scheme(Form(Kind.BNB8), "bitsandbytes bnb8")
    elif stated.get("bnb_4bit_quant_type") in ("nf4", "fp4") and in_bytes:
        choices = {Part.NESTED_SCALE: stated.get("bnb_4bit_use_double_quant") is True}
        name = stated["bnb_4bit_quant_type"]
        scheme = Scheme(Form(Kind(name)), f"bitsandbytes {name}", choices=choices)
        what = f"the parameters of each weight's {name.upper()}"
        note = f"{what} are taken as {BNB4_STATE_BYTES} bytes"
    else:
        return Quantisation("bitsandbytes")
    skipped = stated.get("llm_int8_skip_modules")
    return Quantisation(
        "bitsandbytes", _all_but(skipped, scheme), skips_head=skipped is None, note=note
    )


def _read_gptq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    orders = {"gptq": WordOrder.GPTQ, "gptq_v2": WordOrder.GPTQ_V2}
    order = orders.get(_name_layout(stated, "gptq", "checkpoint_format", "format"))
    form = grouped_form(stated.get("bits"), stated.get("group_size"), order)
    # GPTQModel's exceptions: "-:" and a pattern of what is left as it is, or else other settings
    dynamic = stated.get("dynamic") or {}
    excepted = list(dynamic) if is_record(dynamic) else [""]
    if form is OTHER or stated.get("lm_head") or not all(key[:2] == "-:" for key in excepted):
        return Quantisation("gptq")
    # groups that were told beforehand follow each other, in whatever order columns were quantised
    is_shuffled = stated.get("desc_act") is True and not stated.get("static_groups")
    scheme = Scheme(form, "gptq", "F16", {Part.GROUP_INDEX: is_shuffled})
    patterns = [f"re:{key[2:]}" for key in excepted]
    blocks = stated.get("modules_in_block_to_quantize")
    only = tuple(name for names in blocks for name in names_of(names)) if blocks else ("",)

    def find(module: str) -> Scheme | None:
        is_taken = module.endswith(only) and _IN_STACK.search(module) is not None
        return scheme if is_taken and not targets(patterns, module) else None

    return Quantisation("gptq", find, note=note_scales("F16"))


def _read_awq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    layout = _name_layout(stated, "gemm", "version", "checkpoint_format", "format")
    # the backend llm-awq packs in a way of its own
    is_usual = layout == "gemm" and stated.get("backend") != "llm-awq"
    bits = stated.get("bits", stated.get("w_bit"))
    form = grouped_form(bits, stated.get("group_size"), WordOrder.AWQ if is_usual else None)
    if form is OTHER or stated.get("zero_point") is False:
        return Quantisation("awq")
    scheme = Scheme(form, "awq", "F16")
    kept = names_of(stated.get("modules_to_not_convert"))

    def find(module: str) -> Scheme | None:
        # AutoAWQ, which wrote most of them, looks for the names anywhere: ``visual``, ``mlp.gate``.
        is_kept = skips(kept, module) or has_run(kept, module)
        return scheme if _IN_STACK.search(module) and not is_kept else None

    return Quantisation("awq", find, note=note_scales("F16"))


def _name_layout(stated: Mapping[str, Any], usual: str, *keys: str) -> str:
    """Return what writers of several versions call the layout; nothing where they contradict."""
    named = {str(stated[key]).lower() for key in keys if stated.get(key)}
    return named.pop() if len(named) == 1 else "" if named else usual


def _read_modelopt(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    inner = stated.get("quantization")
    stated = inner if is_record(inner) else stated
    forms = {"FP8": Form(Kind.FP8_TENSOR), "NVFP4": Form(Kind.NVFP4, (1, 16))}
    form = forms.get(str(stated.get("quant_algo")).upper())
    if form is None:
        return Quantisation("modelopt")
    scheme = Scheme(form, f"modelopt {form.kind.value}")
    kept = names_of(stated.get("ignore", stated.get("exclude_modules")))
    return Quantisation(
        "modelopt", lambda module: None if matches_wildcard(kept, module) else scheme
    )


def _read_mlx(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    if stated.get("mode", "affine") != "affine":
        return Quantisation("mlx")
    own: dict[str, Scheme | None] = {}
    for module, value in (("", stated), *stated.items()):
        if is_record(value):
            form = grouped_form(value.get("bits"), value.get("group_size"), WordOrder.MLX)
            if form is OTHER:
                return Quantisation("mlx")
            own[module] = Scheme(form, "mlx", model.float_type)
        elif value is False:
            own[module] = None
    return Quantisation(
        "mlx",
        lambda module: own.get(module, own[""]),
        takes_embeddings=True,
        note=note_scales(model.float_type),
    )


def _all_but(skipped: Any, scheme: Scheme) -> Callable[[str], Scheme | None]:
    """Find the same scheme for all modules but those that transformers would not convert."""
    kept = names_of(skipped)
    return lambda module: None if skips(kept, module) else scheme


_READERS: dict[str, Callable[[Mapping[str, Any], _Model], Quantisation]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "bitsandbytes": _read_bitsandbytes,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": lambda stated, model: read_compressed_tensors(stated, model.float_type),
    "modelopt": _read_modelopt,
    "mlx": _read_mlx,
}
