"""The ``quantization_config`` of each method that quantises.

Source: transformers 5.23, ``utils.quantization_config`` and ``quantizers``; ModelOpt's
``hf_quant_config.json``; mlx-lm, ``utils.save_config``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from offplan.forms.auto_round import read_auto_round
from offplan.forms.compressed_tensors import read_compressed_tensors
from offplan.forms.form import OTHER, Component, Form, Kind, WordOrder
from offplan.forms.matching import (
    IN_STACK,
    block_of,
    grouped_form,
    has_run,
    is_record,
    matches_wildcard,
    names_of,
    read_words,
    skips,
    targets,
)
from offplan.forms.quantisation import (
    BNB4_STATE_BYTES,
    Quantisation,
    Scheme,
    leave_unread,
    note_scales,
)

_E4M3 = ("e4m3", "float8_e4m3fn")
_MODELOPT_FORMS = {
    "FP8": Form(Kind.FP8_TENSOR),
    "NVFP4": Form(Kind.NVFP4, (1, 16)),
    "W4A16_NVFP4": Form(Kind.NVFP4, (1, 16)),
    "MXFP8": Form(Kind.FP8_BLOCK, (1, 32)),
}
"""Forms by ModelOpt's algorithm. Source: the checkpoints that NVIDIA published in 2026."""
_MODELOPT_INPUTS = {"FP8": "FP8", "NVFP4": "FP4", "MXFP8": "FP8"}
"""The types that an algorithm rounds products' inputs to."""
_TORCHAO_FORMS = {
    "Int8WeightOnlyConfig": Form(Kind.W8A16, None, WordOrder.NONE),
    "Float8WeightOnlyConfig": Form(Kind.FP8_CHANNEL),
}
_UNHEEDED = ("rotation", "rotation_config", "spinquant_config", "transform_config", "adapter")
"""Keys of a config beyond how weights are stored. Activations are turned to meet turned weights, or
an adapter corrects the error. Source: GPTQModel, ``QuantizeConfig``; compressed-tensors,
``TransformConfig``; AutoRound, ``save_rotation_config``."""


class _Model(NamedTuple):
    """The facts that quantisers' defaults depend on."""

    model_type: str
    float_type: str
    """Safetensors' name of the type that scales have where it is the model's own."""
    expert_dtype: Any
    """Form of experts that a config states outside of its ``quantization_config``."""
    divides_experts: bool
    """True if the writer has made a linear layer of each matrix of a fused expert."""


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
    # Source: the names in unsloth/gpt-oss-20b-unsloth-bnb-4bit; its own class has fused experts
    divides = model_type == "gpt_oss" and bool(config.get("unsloth_fixed"))
    model = _Model(model_type, float_type, config.get("expert_dtype"), divides)
    method = _name_method(stated)
    read = _READERS.get(method)
    unheeded = {key: stated[key] for key in _UNHEEDED if stated.get(key)}
    if read is None or unheeded:
        return Quantisation(method, is_known=False, unread=unheeded)
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
        method = str(stated["quant_method"]).lower().removeprefix("intel/")
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
    is_deepseek = model.model_type == "deepseek_v4"
    refused = leave_unread(
        "fp8",
        {**stated, "expert_dtype": experts},
        weight_block_size=block is not None or (size is None and not is_deepseek),
        expert_dtype=experts in (("fp8", "fp4") if is_deepseek else ("fp8",)),
        fmt=stated.get("fmt", "e4m3") in _E4M3,
        modules_to_convert=not stated.get("modules_to_convert"),
    )
    if refused:
        return refused
    if is_deepseek:
        return _read_deepseek_v4(stated, Form(Kind.FP8_BLOCK, block), experts)
    form = Form(Kind.FP8_TENSOR if block is None else Kind.FP8_BLOCK, block)
    # DeepSeek and most others store them in float32; Qwen does not, nor does Mistral one a matrix
    scale = "BF16" if model.model_type.startswith("qwen") or block is None else "F32"
    is_static = stated.get("activation_scheme") == "static"
    scheme = Scheme(form, f"fp8 {form.kind.value}", scale, {Component.INPUT_SCALE: is_static})
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
    if named is None:
        return Quantisation("fp8", unread={"quantized_layers": stated.get("quantized_layers")})
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
    has_bytes = stated.get("load_in_8bit") is True or stated.get("_load_in_8bit") is True
    name = str(stated.get("bnb_4bit_quant_type"))
    refused = leave_unread(
        "bitsandbytes",
        stated,
        bnb_4bit_quant_type=has_bytes or name in ("nf4", "fp4"),
        bnb_4bit_quant_storage=has_bytes
        or stated.get("bnb_4bit_quant_storage", "uint8") == "uint8",
    )
    if refused:
        return refused
    if has_bytes:
        scheme = Scheme(Form(Kind.BNB8), "bitsandbytes bnb8")
    else:
        choices = {Component.NESTED_SCALE: stated.get("bnb_4bit_use_double_quant") is True}
        scheme = Scheme(Form(Kind(name)), f"bitsandbytes {name}", choices=choices)
        what = f"the parameters of each weight's {name.upper()}"
        note = f"{what} are taken as {BNB4_STATE_BYTES} bytes"
    skipped = stated.get("llm_int8_skip_modules")
    return Quantisation(
        "bitsandbytes",
        _all_but(skipped, scheme),
        skips_head=skipped is None,
        takes_linear_alone=not model.divides_experts,
        divides_experts=model.divides_experts,
        activations=("INT8",) if scheme.form.kind is Kind.BNB8 else (),
        note=note,
    )


def _read_gptq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    orders = {"gptq": WordOrder.GPTQ, "gptq_v2": WordOrder.GPTQ_V2}
    key, layout = _name_layout(stated, "gptq", "checkpoint_format", "format")
    order = orders.get(layout)
    # groups that were told beforehand follow each other, in whatever order columns were quantised
    choices = {
        Component.GROUP_INDEX: stated.get("desc_act") is True and not stated.get("static_groups")
    }
    scheme = None
    if order is not None:
        scheme = read_words(stated.get("bits"), stated.get("group_size"), order, "gptq", choices)
    # GPTQModel's exceptions: "-:" and a pattern of what is left as it is, or else other settings
    dynamic = stated.get("dynamic") or {}
    excepted = list(dynamic) if is_record(dynamic) else [""]
    blocks = stated.get("modules_in_block_to_quantize")
    refused = leave_unread(
        "gptq",
        stated,
        **{key: order is not None},
        **dict.fromkeys(("bits", "group_size"), scheme is not None or order is None),
        lm_head=not stated.get("lm_head"),
        dynamic=all(key[:2] == "-:" for key in excepted),
        modules_in_block_to_quantize=not blocks or isinstance(blocks, list),
    )
    if refused:
        return refused
    patterns = [f"re:{key[2:]}" for key in excepted]
    only = tuple(name for names in blocks for name in names_of(names)) if blocks else ("",)

    def find(module: str) -> Scheme | None:
        is_taken = module.endswith(only) and IN_STACK.search(module) is not None
        return scheme if is_taken and not targets(patterns, module) else None

    return Quantisation("gptq", find, note=note_scales("F16"))


def _read_awq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    key, layout = _name_layout(stated, "gemm", "version", "checkpoint_format", "format")
    bits = "bits" if "bits" in stated else "w_bit"
    scheme = read_words(stated.get(bits), stated.get("group_size"), WordOrder.AWQ, "awq")
    refused = leave_unread(
        "awq",
        stated,
        **dict.fromkeys((bits, "group_size"), scheme is not None),
        **{key: layout == "gemm"},
        backend=stated.get("backend") != "llm-awq",  # which packs in a way of its own
        zero_point=stated.get("zero_point") is not False,
    )
    if refused:
        return refused
    kept = names_of(stated.get("modules_to_not_convert"))

    def find(module: str) -> Scheme | None:
        # AutoAWQ, which wrote most of them, looks for the names anywhere: ``visual``, ``mlp.gate``.
        is_kept = skips(kept, module) or has_run(kept, module)
        return scheme if IN_STACK.search(module) and not is_kept else None

    # AutoAWQ's own layer takes whole groups alone
    return Quantisation("awq", find, leaves_misfits=True, note=note_scales("F16"))


def _name_layout(stated: Mapping[str, Any], usual: str, *keys: str) -> tuple[str, str]:
    """Return the key and the name by which a writer of some version states the layout.

    The name is empty where several contradict each other.
    """
    named = {key: str(stated[key]).lower() for key in keys if stated.get(key)}
    key, name = next(iter(named.items()), (keys[0], usual))
    return key, name if len({*named.values()}) <= 1 else ""


def _read_modelopt(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    inner = stated.get("quantization")
    stated = inner if is_record(inner) else stated
    kept = names_of(stated.get("ignore", stated.get("exclude_modules")))
    cache = stated.get("kv_cache_scheme", stated.get("kv_cache_quant_algo"))
    has_cache_scales = cache == "FP8" or (is_record(cache) and cache.get("dynamic") is False)
    scheme = _modelopt_scheme(stated.get("quant_algo"))
    inputs = _modelopt_inputs(stated.get("quantized_layers"), stated.get("quant_algo"))
    is_mixed = str(stated.get("quant_algo")).upper() == "MIXED_PRECISION"
    named = _schemes_by_layer(stated.get("quantized_layers")) if is_mixed else {}
    refused = leave_unread(
        "modelopt",
        stated,
        quant_algo=is_mixed or scheme is not None,
        quantized_layers=not is_mixed or bool(named),
    )
    if refused:
        return refused

    def find(module: str) -> Scheme | None:
        if matches_wildcard(kept, module):
            return None
        return _find_by_layer(named, module) if named else scheme

    return Quantisation("modelopt", find, has_cache_scales=has_cache_scales, activations=inputs)


def _modelopt_scheme(algorithm: Any) -> Scheme | None:
    """Return the scheme of one of ModelOpt's algorithms; None where it is not known."""
    name = str(algorithm).upper()
    form = _MODELOPT_FORMS.get(name)
    quantises_inputs = {Component.INPUT_SCALE: name in _MODELOPT_INPUTS and name != "MXFP8"}
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

    Version 0.18 names the granularity, and stores zeros of 0 beside ``Int8WeightOnlyConfig``'s.
    Source: torchao 0.14 and 0.18, ``Int8WeightOnlyConfig`` and ``Float8WeightOnlyConfig``.
    """
    types = stated.get("quant_type")
    how = types.get("default") if is_record(types) and len(types) == 1 else None
    form = _TORCHAO_FORMS.get(str(how.get("_type"))) if is_record(how) else None
    said = how.get("_data") if is_record(how) else None
    said = said if is_record(said) else {}
    # older versions know one scale a row alone, and do not say so
    rows = said.get("granularity")
    is_by_row = not said.get("group_size") and (rows is None or "PerRow" in str(rows)[:200])
    refused = leave_unread(
        "torchao",
        stated,
        quant_type=form is not None and is_by_row,
        include_input_output_embeddings=not stated.get("include_input_output_embeddings"),
    )
    if form is None or refused:
        return replace(refused or Quantisation("torchao"), is_known=False)
    has_zeros = form.kind is Kind.W8A16 and rows is not None
    scale = "F32" if form.kind is Kind.FP8_CHANNEL or has_zeros else model.float_type
    skipped = stated.get("modules_to_not_convert")
    scheme = Scheme(form, f"torchao {form.kind.value}", scale, {Component.ZERO: has_zeros})
    find = _all_but(skipped, scheme)
    return Quantisation("torchao", find, skips_head=skipped is None, takes_linear_alone=True)


def _read_mlx(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    if refused := leave_unread("mlx", stated, mode=stated.get("mode", "affine") == "affine"):
        return refused
    own: dict[str, Scheme | None] = {}
    for module, value in (("", stated), *stated.items()):
        if is_record(value):
            form = grouped_form(value.get("bits"), value.get("group_size"), WordOrder.MLX)
            if form is OTHER:
                found = {key: value.get(key) for key in ("bits", "group_size")}
                return Quantisation("mlx", unread=found)
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
    "auto-round": lambda stated, model: read_auto_round(stated, model.float_type),
    "awq": _read_awq,
    "compressed-tensors": lambda stated, model: read_compressed_tensors(stated, model.float_type),
    "modelopt": _read_modelopt,
    "torchao": _read_torchao,
    "mlx": _read_mlx,
}
READ_METHODS = tuple(sorted(_READERS))
"""Methods that offplan reads."""
