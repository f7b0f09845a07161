"""The ``quantization_config`` of each method that quantises.

Source: transformers 5.23, ``utils.quantization_config`` and ``quantizers``; ModelOpt's
``hf_quant_config.json``; mlx-lm, ``utils.save_config``.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offplan.forms.compressed_tensors import read_compressed_tensors
from offplan.forms.form import OTHER, Form, Kind, Part, WordOrder
from offplan.forms.matching import compile_pattern, has_run, matches_wildcard, skips, targets
from offplan.forms.quantisation import Quantisation, note_scales
from offplan.forms.scheme import BNB4_STATE_BYTES, Scheme
from offplan.forms.stated import block_of, grouped_form, is_record, is_size, names_of

_IN_STACK = re.compile(r"\.\d+\.")
"""Tells the modules of a stack of layers from those outside, such as the head."""
_NAME = re.compile(r"[\w.]+\.\d+\.[\w.]+")
"""Tells names of such modules from patterns, where a key may be either."""
_AUTO_ROUND_UNREAD = (
    "quant_lm_head",
    "dynamic",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
)
"""Keys of AutoRound by which it takes other layers than all of its blocks."""
_E4M3 = ("e4m3", "float8_e4m3fn")
_MODELOPT_FORMS = {
    "FP8": Form(Kind.FP8_TENSOR),
    "NVFP4": Form(Kind.NVFP4, (1, 16)),
    "W4A16_NVFP4": Form(Kind.NVFP4, (1, 16)),
    "MXFP8": Form(Kind.FP8_BLOCK, (1, 32)),
}
"""Forms by ModelOpt's algorithm. Source: the checkpoints that NVIDIA published in 2026."""
_MODELOPT_INPUTS = {"FP8": "FP8", "NVFP4": "FP4", "MXFP8": "FP8"}
"""What an algorithm rounds products' inputs to."""
_TORCHAO_FORMS = {
    "Int8WeightOnlyConfig": Form(Kind.W8A16, None, WordOrder.NONE),
    "Float8WeightOnlyConfig": Form(Kind.FP8_CHANNEL),
}
_UNHEEDED = ("rotation", "transform_config", "adapter")
"""Keys of a config beyond how weights are stored. Activations are turned to meet turned weights, or
an adapter corrects the error. Source: GPTQModel, ``QuantizeConfig``; compressed-tensors,
``TransformConfig``."""


class _Model(NamedTuple):
    """The facts that quantisers' defaults depend on."""

    model_type: str
    float_type: str
    """Safetensors' name of the type that scales have where it is the model's own."""
    expert_dtype: Any
    """Form of experts that a config states outside of its ``quantization_config``."""


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
    stated = _without_nulls(stated)
    float_type = "F16" if dtype == "float16" else "BF16"
    model = _Model(model_type, float_type, config.get("expert_dtype"))
    method = _name_method(stated)
    read = _READERS.get(method)
    if read is None or any(stated.get(key) for key in _UNHEEDED):
        return Quantisation(method, is_known=False)
    return read(stated, model)


def _without_nulls(stated: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """Leave out keys that say null, which says what leaving them out says: all but FP8's blocks."""
    return {
        key: _without_nulls(value, depth - 1) if is_record(value) and depth else value
        for key, value in stated.items()
        if value is not None or key == "weight_block_size"
    }


def _name_method(stated: Mapping[str, Any]) -> str:
    """Return the ``quant_method``; mlx-lm, and old files of two others, do not name theirs."""
    if "quant_method" in stated:
        method = str(stated["quant_method"]).lower()
        return "modelopt" if method.startswith("modelopt") else method
    if "quant_algo" in stated:
        return "modelopt"
    if "config_groups" in stated:
        return "compressed-tensors"
    return "mlx" if "group_size" in stated and "bits" in stated else "unknown"


def _read_fp8(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    # what transformers takes for an absent one; null is one scale a matrix
    size = stated.get("weight_block_size", [128, 128])
    block = block_of(size)
    experts = stated.get("expert_dtype", model.expert_dtype or "fp8")
    is_usual = experts in ("fp8", "fp4") and stated.get("fmt", "e4m3") in _E4M3
    if (size is not None and block is None) or not is_usual or stated.get("modules_to_convert"):
        return Quantisation("fp8")
    if model.model_type == "deepseek_v4":
        return _read_deepseek_v4(stated, Form(Kind.FP8_BLOCK, block), experts)
    if experts == "fp4":
        return Quantisation("fp8")
    form = Form(Kind.FP8_TENSOR if block is None else Kind.FP8_BLOCK, block)
    # DeepSeek and most others store them in float32; Qwen does not, nor does Mistral one a matrix
    scale = "BF16" if model.model_type.startswith("qwen") or block is None else "F32"
    is_static = stated.get("activation_scheme") == "static"
    scheme = Scheme(form, f"fp8 {form.kind.value}", scale, {Part.INPUT_SCALE: is_static})
    skipped = stated.get("modules_to_not_convert", stated.get("ignored_layers"))
    return Quantisation(
        "fp8",
        _all_but(skipped, scheme),
        skips_head=skipped is None,
        activations=("FP8",),
        note=note_scales(scale),
    )


def _read_deepseek_v4(stated: Mapping[str, Any], form: Form, experts: str) -> Quantisation:
    """Read what DeepSeek-V4 stores: FP8, experts in FP4, all scales powers of two.

    NVIDIA's NVFP4 of it names its experts as ModelOpt does. Source: the names and types of
    DeepSeek-V4-Flash's tensors; its compressors and the weights of its indexers are in 16 bits.
    """
    dense = Scheme(form, "deepseek fp8_block")
    routed = Scheme(Form(Kind.MXFP4, (1, 32)), "deepseek mxfp4") if experts == "fp4" else dense
    named = _schemes_by_layer(stated.get("quantized_layers"))
    if form.block is None or named is None:
        return Quantisation("fp8")
    inputs = {"FP8", *_modelopt_inputs(stated.get("quantized_layers"))}

    def find(module: str) -> Scheme | None:
        if has_run(("compressor", "weights_proj"), module):
            return None
        own = _find_by_layer(named, module)
        return own or (routed if has_run(("experts",), module) else dense)

    return Quantisation("fp8", find, skips_head=True, activations=tuple(sorted(inputs)))


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
        "bitsandbytes",
        _all_but(skipped, scheme),
        skips_head=skipped is None,
        takes_linear_alone=True,
        activations=("INT8",) if scheme.form.kind is Kind.BNB8 else (),
        note=note,
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
    if blocks and not isinstance(blocks, list):
        return Quantisation("gptq")
    only = tuple(name for names in blocks for name in names_of(names)) if blocks else ("",)

    def find(module: str) -> Scheme | None:
        is_taken = module.endswith(only) and _IN_STACK.search(module) is not None
        return scheme if is_taken and not targets(patterns, module) else None

    return Quantisation("gptq", find, note=note_scales("F16"))


def _read_auto_round(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    """Read AutoRound's own files, of which one layout is known: GPTQ's words, without an index.

    Source: AutoRound 0.9, ``export_to_autoround`` and ``get_layer_config``.
    """
    own = stated.get("extra_config") or {}
    blocks = stated.get("block_name_to_quantize") or stated.get("to_quant_block_names") or ""
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else names_of(blocks)
    is_known = stated.get("packing_format") == "auto_round:auto_gptq" and bool(blocks)
    is_known &= stated.get("data_type", "int") == "int"
    is_known &= not any(stated.get(key) for key in _AUTO_ROUND_UNREAD)
    if not is_known or not is_record(own):
        return Quantisation("auto-round")

    def scheme_of(said: Mapping[str, Any]) -> Scheme | None:
        bits, group = (said.get(key, stated.get(key)) for key in ("bits", "group_size"))
        if type(bits) is int and bits >= 16:
            return None
        return Scheme(grouped_form(bits, group, WordOrder.GPTQ), "auto-round gptq", "F16")

    usual = scheme_of({})
    named = {name: scheme_of(said) for name, said in own.items() if is_record(said) and said}
    patterns = [name for name in named if not _NAME.fullmatch(name)]
    found = [usual, *named.values()]
    if usual is None or any(each and each.form is OTHER for each in found):
        return Quantisation("auto-round")

    def find(module: str) -> Scheme | None:
        if not module.startswith(blocks) or not _IN_STACK.search(module):
            return None
        if module in named:
            return named[module]
        meant = (named[each] for each in patterns if compile_pattern(each).search(module))
        return next(meant, usual)

    bits = stated.get("act_bits")
    inputs = (f"INT{bits}",) if is_size(bits) and bits < 16 else ()
    return Quantisation("auto-round", find, activations=inputs, note=note_scales("F16"))


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

    # AutoAWQ's own layer takes whole groups alone
    return Quantisation("awq", find, leaves_misfits=True, note=note_scales("F16"))


def _name_layout(stated: Mapping[str, Any], usual: str, *keys: str) -> str:
    """Return what writers of several versions call the layout; nothing where they contradict."""
    named = {str(stated[key]).lower() for key in keys if stated.get(key)}
    return named.pop() if len(named) == 1 else "" if named else usual


def _read_modelopt(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    inner = stated.get("quantization")
    stated = inner if is_record(inner) else stated
    kept = names_of(stated.get("ignore", stated.get("exclude_modules")))
    cache = stated.get("kv_cache_scheme", stated.get("kv_cache_quant_algo"))
    has_cache_scales = cache == "FP8" or (is_record(cache) and cache.get("dynamic") is False)
    scheme = _modelopt_scheme(stated.get("quant_algo"))
    inputs = _modelopt_inputs(stated.get("quantized_layers"), stated.get("quant_algo"))
    named: Mapping[str, Scheme] | None = {}
    if str(stated.get("quant_algo")).upper() == "MIXED_PRECISION":
        named = _schemes_by_layer(stated.get("quantized_layers"))
    if named is None or not (named or scheme):
        return Quantisation("modelopt")

    def find(module: str) -> Scheme | None:
        if matches_wildcard(kept, module):
            return None
        return _find_by_layer(named, module) if named else scheme

    return Quantisation("modelopt", find, has_cache_scales=has_cache_scales, activations=inputs)


def _modelopt_scheme(algorithm: Any) -> Scheme | None:
    """Return the scheme of one of ModelOpt's algorithms; None where it is not known."""
    name = str(algorithm).upper()
    form = _MODELOPT_FORMS.get(name)
    quantises_inputs = {Part.INPUT_SCALE: name in _MODELOPT_INPUTS and name != "MXFP8"}
    return form and Scheme(form, f"modelopt {form.kind.value}", choices=quantises_inputs)


def _modelopt_inputs(named: Any, algorithm: Any = None) -> tuple[str, ...]:
    """List what inputs of layers are rounded to, by one algorithm or ``quantized_layers``."""
    layers = named.values() if is_record(named) else ()
    algorithms = [algorithm, *(each.get("quant_algo") for each in layers if is_record(each))]
    types = {_MODELOPT_INPUTS.get(str(each).upper()) for each in algorithms}
    return tuple(sorted(filter(None, types)))


def _schemes_by_layer(named: Any) -> Mapping[str, Scheme] | None:
    """Read ModelOpt's ``quantized_layers``; None where one of them is of no known algorithm."""
    if not named:
        return {}
    found = {
        name: _modelopt_scheme(value.get("quant_algo"))
        for name, value in (named.items() if is_record(named) else ())
        if is_record(value)
    }
    known = {name: scheme for name, scheme in found.items() if scheme is not None}
    return known if known and len(known) == len(named) else None


def _find_by_layer(named: Mapping[str, Scheme], module: str) -> Scheme | None:
    """Return the scheme of a module, or of the nearest that it lies in and that is named."""
    while module and module not in named:
        module = module.rpartition(".")[0]
    return named.get(module)


def _read_torchao(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    """Read torchao's two ways that quantise weights alone, a scale for each row.

    Source: torchao 0.14, ``Int8WeightOnlyConfig`` and ``Float8WeightOnlyConfig``.
    """
    types = stated.get("quant_type")
    how = types.get("default") if is_record(types) and len(types) == 1 else None
    form = _TORCHAO_FORMS.get(str(how.get("_type"))) if is_record(how) else None
    data = how.get("_data") if is_record(how) else None
    is_plain = form is not None and not (is_record(data) and data.get("group_size"))
    if form is None or not is_plain or stated.get("include_input_output_embeddings"):
        return Quantisation("torchao", is_known=False)
    scale = "F32" if form.kind is Kind.FP8_CHANNEL else model.float_type
    skipped = stated.get("modules_to_not_convert")
    scheme = Scheme(form, f"torchao {form.kind.value}", scale)
    find = _all_but(skipped, scheme)
    return Quantisation("torchao", find, skips_head=skipped is None, takes_linear_alone=True)


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
    "auto-round": _read_auto_round,
    "awq": _read_awq,
    "compressed-tensors": lambda stated, model: read_compressed_tensors(stated, model.float_type),
    "modelopt": _read_modelopt,
    "torchao": _read_torchao,
    "mlx": _read_mlx,
}
