"""A config's ``quantization_config``: which modules are stored in which form.

Source: transformers 5.23, ``utils.quantization_config`` and ``quantizers``; compressed-tensors,
``QuantizationConfig``; ModelOpt's ``hf_quant_config.json``; mlx-lm, ``utils.save_config``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from offplan.errors import CheckpointError
from offplan.forms.form import OTHER, Form, Kind, Packing
from offplan.forms.matching import has_run, matches_wildcard, skips, targets
from offplan.forms.recognise import WHOLE_KINDS
from offplan.forms.scheme import Scheme

_IN_STACK = re.compile(r"\.\d+\.")
"""Tells the modules of a stack of layers from those outside, such as the head."""


@dataclass(frozen=True)
class Quantisation:
    """How the modules of a quantised checkpoint are stored, as far as its config says."""

    method: str
    """The config's ``quant_method``; ``mlx`` for mlx-lm's, which has none."""
    find: Callable[[str], Scheme | None] | None = None
    """Gives the scheme of a linear layer by its name, None where it is left as it is; itself None
    where the config does not determine what is stored."""
    takes_experts_alone: bool = False
    """Whether fused experts are all that is quantised (MXFP4 of gpt-oss)."""
    skips_head: bool = False
    """Whether the head, and what is tied to it, is left as it is without being named."""
    takes_embeddings: bool = False
    """Whether embeddings are quantised as linear layers are."""
    note: str | None = None
    """What was taken where the config leaves a choice."""

    @property
    def is_known(self) -> bool:
        """Whether the meaning of what this method stores is known."""
        return self.method in _READERS

    def stated(self, module: str) -> Form | None:
        """Return the form that the config states for a module of this name; None if it is unsure.

        A pattern that is not taken leaves it unsure: what headers alone do not tell is OTHER then.
        """
        if self.find is None or len(module) > _MAX_NAME:
            return None
        try:
            scheme = self.find(module)
        except CheckpointError:
            return None
        return None if scheme is None else scheme.form


_SCALES = "the config does not say the type of the scales: scales taken as {}"
_MAX_NAME = 500
"""Characters of the longest name that patterns are matched with."""


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
        return Quantisation("unknown")
    default = "mlx" if "group_size" in stated and "bits" in stated else "unknown"
    method = str(stated.get("quant_method") or default).lower()
    if method == "unknown" and "config_groups" in stated:
        method = "compressed-tensors"
    read = _READERS.get(method)
    model = _Model(model_type, "F16" if dtype == "float16" else "BF16")
    return Quantisation(method) if read is None else read(stated, model)


def _read_fp8(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    block = stated.get("weight_block_size", [128, 128])
    is_pair = isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))
    if (block is not None and not is_pair) or stated.get("modules_to_convert"):
        return Quantisation("fp8")
    if stated.get("expert_dtype", "fp8") != "fp8" or stated.get("fmt", "e4m3") != "e4m3":
        return Quantisation("fp8")
    scale = "BF16" if model.model_type.startswith("qwen") or block is None else "F32"
    names = stated.get("modules_to_not_convert", stated.get("ignored_layers"))
    form = Form(Kind.FP8_TENSOR) if block is None else Form(Kind.FP8_BLOCK, (block[0], block[1]))
    scheme = Scheme(
        form,
        "fp8 tensor" if block is None else "fp8 block",
        scale=scale,
        has_input_scale=stated.get("activation_scheme") == "static",
    )
    kept = _names(names)
    return Quantisation(
        "fp8",
        lambda module: None if skips(kept, module) else scheme,
        skips_head=names is None,
        note=_SCALES.format(scale),
    )


def _read_mxfp4(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    scheme = Scheme(Form(Kind.MXFP4, (1, 32)), "mxfp4", bits=4)
    kept = _names(stated.get("modules_to_not_convert"))
    return Quantisation(
        "mxfp4",
        lambda module: None if skips(kept, module) else scheme,
        takes_experts_alone=True,
    )


def _read_bitsandbytes(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    names = stated.get("llm_int8_skip_modules")
    kept = _names(names)
    if stated.get("load_in_8bit") is True or stated.get("_load_in_8bit") is True:
        scheme, note = Scheme(Form(Kind.BNB8), "bnb8", scale="F32"), None
    elif stated.get("bnb_4bit_quant_type") == "nf4":
        if stated.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            return Quantisation("bitsandbytes")
        is_nested = stated.get("bnb_4bit_use_double_quant") is True
        scheme = Scheme(Form(Kind.NF4), "nf4", bits=4, is_nested=is_nested)
        note = "what bitsandbytes stores beside each weight is taken as 96 bytes, as it is about"
    else:
        return Quantisation("bitsandbytes")
    return Quantisation(
        "bitsandbytes",
        lambda module: None if skips(kept, module) else scheme,
        skips_head=names is None,
        note=note,
    )


def _read_gptq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    packings = {"gptq": Packing.GPTQ, "gptq_v2": Packing.GPTQ_V2}
    packing = packings.get(str(stated.get("checkpoint_format") or "gptq"))
    form = _grouped_form(stated.get("bits"), stated.get("group_size"), packing)
    dynamic = stated.get("dynamic") or {}
    excluded = list(dynamic) if _is_record(dynamic) else [""]
    if form is OTHER or stated.get("lm_head") or not all(key[:2] == "-:" for key in excluded):
        return Quantisation("gptq")
    scheme = Scheme(form, "gptq", bits=_bits(form), scale="F16", has_zeros=True)
    patterns = ["re:" + key.removeprefix("-:") for key in excluded]
    blocks = stated.get("modules_in_block_to_quantize")
    only = _names([name for names in blocks for name in _names(names)]) if blocks else None

    def find(module: str) -> Scheme | None:
        taken = only is None or module.endswith(only)
        in_stack = _IN_STACK.search(module) is not None
        return scheme if taken and in_stack and not targets(patterns, module) else None

    note = _SCALES.format("F16")
    return Quantisation("gptq", find, note=note)


def _read_awq(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    version = str(stated.get("version") or "gemm").lower()
    packing = Packing.AWQ if version == "gemm" else None
    form = _grouped_form(stated.get("bits", stated.get("w_bit")), stated.get("group_size"), packing)
    if form is OTHER or stated.get("zero_point") is False:
        return Quantisation("awq")
    scheme = Scheme(form, "awq", bits=_bits(form), scale="F16", has_zeros=True)
    kept = _names(stated.get("modules_to_not_convert"))

    def find(module: str) -> Scheme | None:
        # AutoAWQ, which wrote most of them, looks for the names anywhere: ``visual``, ``mlp.gate``.
        is_kept = skips(kept, module) or has_run(kept, module)
        return scheme if _IN_STACK.search(module) and not is_kept else None

    note = _SCALES.format("F16")
    return Quantisation("awq", find, note=note)


def _read_compressed_tensors(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    groups = stated.get("config_groups")
    ignored = _names(stated.get("ignore"))
    unknown = Quantisation("compressed-tensors")
    if not _is_record(groups) or stated.get("sparsity_config") or stated.get("transform_config"):
        return unknown
    found = []
    for group in groups.values():
        if not _is_record(group):
            return unknown
        scheme = _read_group(
            group, str(group.get("format") or stated.get("format")), model.float_type
        )
        meant = _names(group.get("targets"))
        # a target without a dot is the name of a class, of which only one is known here
        if scheme is None or any("." not in name and name != "Linear" for name in meant):
            return unknown
        found.append((meant, scheme))

    def find(module: str) -> Scheme | None:
        if targets(ignored, module):
            return None
        return next((scheme for meant, scheme in found if targets(meant, module)), None)

    note = _SCALES.format(model.float_type)
    return Quantisation("compressed-tensors", find, note=note)


def _read_group(group: Mapping[str, Any], layout: str, scale: str) -> Scheme | None:
    """Return the scheme of one of compressed-tensors' groups; None where it is not known."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not _is_record(weights):
        return None
    strategy, bits = weights.get("strategy"), weights.get("num_bits")
    size, block = weights.get("group_size"), weights.get("block_structure")
    is_static = _is_record(inputs) and inputs.get("dynamic") is False
    symmetric = weights.get("symmetric") is not False
    if layout in ("float-quantized", "naive-quantized") and (bits, weights.get("type")) == (
        8,
        "float",
    ):
        kinds = {
            "channel": Form(Kind.FP8_CHANNEL),
            "tensor": Form(Kind.FP8_TENSOR),
        }
        if strategy == "block" and isinstance(block, list) and len(block) == 2:
            kinds["block"] = Form(Kind.FP8_BLOCK, (block[0], block[1]))
            if not all(map(_is_size, block)):
                return None
        if strategy not in kinds or not symmetric:
            return None
        name = "ct fp8 tensor" if strategy == "tensor" else "ct fp8"
        return Scheme(kinds[strategy], name, scale=scale, has_input_scale=is_static)
    if layout == "nvfp4-pack-quantized":
        form = Form(Kind.NVFP4, (1, 16))
        return Scheme(form, "nvfp4", bits=4, has_input_scale=_is_record(inputs))
    if layout == "mxfp4-pack-quantized":
        return Scheme(Form(Kind.MXFP4, (1, 32)), "mxfp4", bits=4)
    if weights.get("type") != "int" or strategy not in ("group", "channel"):
        return None
    if layout == "pack-quantized":
        form = _grouped_form(bits, size if strategy == "group" else -1, Packing.COMPRESSED_TENSORS)
        if form is OTHER:
            return None
        has_index = str(weights.get("actorder")).lower() in ("group", "true")
        return Scheme(
            form,
            "packed",
            scale=scale,
            bits=_bits(form),
            has_zeros=not symmetric,
            has_group_index=has_index,
        )
    if layout == "int-quantized" and bits == 8:
        form = _grouped_form(8, size if strategy == "group" else -1, Packing.NONE)
        zeros = not symmetric
        return Scheme(form, "ct int8", scale=scale, has_zeros=zeros, has_input_scale=is_static)
    return None


def _read_modelopt(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    inner = stated.get("quantization")
    stated = inner if _is_record(inner) else stated
    kept = _names(stated.get("ignore", stated.get("exclude_modules")))
    schemes = {
        "FP8": Scheme(Form(Kind.FP8_TENSOR), "modelopt fp8"),
        "NVFP4": Scheme(Form(Kind.NVFP4, (1, 16)), "modelopt nvfp4", bits=4),
    }
    scheme = schemes.get(str(stated.get("quant_algo")).upper())
    if scheme is None:
        return Quantisation("modelopt")
    return Quantisation(
        "modelopt", lambda module: None if matches_wildcard(kept, module) else scheme
    )


def _read_mlx(stated: Mapping[str, Any], model: _Model) -> Quantisation:
    form = _grouped_form(stated.get("bits"), stated.get("group_size"), Packing.MLX)
    if form is OTHER or stated.get("mode", "affine") != "affine":
        return Quantisation("mlx")
    own: dict[str, Scheme | None] = {}
    for module, value in stated.items():
        if value is False:
            own[module] = None
        elif _is_record(value):
            its = _grouped_form(value.get("bits"), value.get("group_size"), Packing.MLX)
            if its is OTHER:
                return Quantisation("mlx")
            own[module] = Scheme(its, "mlx", bits=_bits(its), scale=model.float_type)
    scheme = Scheme(form, "mlx", bits=_bits(form), scale=model.float_type)
    note = _SCALES.format(model.float_type)
    return Quantisation(
        "mlx", lambda module: own.get(module, scheme), takes_embeddings=True, note=note
    )


_READERS: dict[str, Callable[[Mapping[str, Any], _Model], Quantisation]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "bitsandbytes": _read_bitsandbytes,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "mlx": _read_mlx,
}


def _grouped_form(bits: Any, group: Any, packing: Packing | None) -> Form:
    """Return the form of whole numbers in groups; -1 columns are all of a row's."""
    if packing is None or type(bits) is not int or bits not in WHOLE_KINDS:
        return OTHER
    if group is None or group == -1:
        return Form(WHOLE_KINDS[bits], None, packing)
    return Form(WHOLE_KINDS[bits], (1, group), packing) if _is_size(group) else OTHER


def _bits(form: Form) -> int:
    return 4 if form.kind is Kind.W4A16 else 8


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**20


def _is_record(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _names(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, (list, tuple)) else ()
    return tuple(name for name in names if isinstance(name, str) and name)
