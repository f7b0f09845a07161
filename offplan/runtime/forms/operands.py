"""What the kernels are given of a weight in its stored form, and what they are made for."""

from typing import Any, NamedTuple

import torch

from offplan.forms.form import BITS, Form, Kind, Packing, Part
from offplan.runtime.forms.reference import ONES, Parts, block_of, codes_of, nested_scales


class Operands(NamedTuple):
    """A weight, or those of all experts, as arguments of kernels."""

    num_experts: int
    num_out: int
    length: int
    """Elements along a row: bytes or words, or inputs where words lie along columns."""
    pack: int
    """Weights in such an element."""
    arguments: tuple[torch.Tensor | int | None, ...]
    """The tensors that it is stored in, and their sizes."""
    constants: dict[str, Any]
    block_k: int
    """Elements that a product takes at once, at most."""
    element_bytes: int = 4
    """Bytes that are stored for such an element, at most."""


def is_stacked(form: Form, parts: Parts) -> bool:
    """Whether parts are those of experts' weights, be it of one, and not of a weight alone."""
    return parts[Part.WEIGHT if form.kind is Kind.PACKED else Part.SCALE].ndim > 2


def operands_of(form: Form, parts: Parts, *, in_words: bool = False) -> Operands:
    """Prepare a weight for the kernels; nothing but views and nested scales is made.

    Codes of four bits in rows are given ``in_words`` of eight, else in bytes of two.
    """
    # what there is one of is taken as one expert's
    if not is_stacked(form, parts):
        parts = {part: value[None] if value.ndim > 1 else value for part, value in parts.items()}
    if form.kind is Kind.PACKED:
        return _packed(parts)
    if form.is_by_columns:
        return _columns(form, parts)
    return _rows(form, parts, in_words)


def _packed(parts: Parts) -> Operands:
    codes, exponents, patches = (
        parts[part].view(torch.int32) for part in (Part.WEIGHT, Part.EXPONENT, Part.PATCHES)
    )
    num_experts, num_out, length = exponents.shape
    bounds, reserve = parts[Part.PATCH_BLOCKS], patches.shape[1]
    arguments = codes, exponents, parts[Part.BASE], patches, bounds, reserve
    # an element is a word of exponents, which goes with two of codes
    return Operands(num_experts, num_out, length, 8, arguments, {}, block_k=32, element_bytes=12)


def _rows(form: Form, parts: Parts, in_words: bool) -> Operands:
    if form.kind in (Kind.NF4, Kind.FP4):
        parts = parts | {Part.SCALE: nested_scales(parts)}
    codes, scales = codes_of(parts), parts[Part.SCALE]
    code, pack = _code_of(form, codes.device), 1
    if code in ("fp4", "table", "uint4"):
        codes, pack = (codes.view(torch.int32), 8) if in_words else (codes, 2)
    num_experts, num_out, length = codes.shape
    high, wide = block_of(form, num_out, length * pack, scales)
    whole = parts.get(Part.GLOBAL_SCALE, parts.get(Part.GLOBAL_DIVISOR))
    zero = "words" if form.packing is Packing.COMPRESSED_TENSORS else "bytes"
    if Part.ZERO not in parts:
        zero = "middle" if form.packing is Packing.COMPRESSED_TENSORS else ""
    own = {
        "CODE": code,
        "PACK": pack,
        "BITS": 8 if pack == 1 else 4,
        "SCALE": "float",
        "GLOBAL": "",
        "GLOBAL_ROWS": num_out if whole is None else num_out // whole.shape[1],
        "ZERO": zero,
        "SCALE_ROWS": high,
        "SCALE_ELEMENTS": wide // pack,
    }
    if form.kind is Kind.NVFP4:
        own["GLOBAL"] = "factor" if Part.GLOBAL_SCALE in parts else "divisor"
        own["SCALE"] = _fp8_code(codes.device)
    elif form.kind is Kind.MXFP4:
        own["SCALE"] = "exponent"
    elif form.kind is Kind.BNB8:
        own["SCALE"] = "largest"
    if scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
    arguments = codes, scales, parts.get(Part.ZERO), whole, parts.get(Part.CODES), *scales.shape[1:]
    # a tile of bytes lies under one scale, one of words under one or several whole ones
    block_k = min(128, 1 << (wide.bit_length() - 1)) if pack == 1 else 64
    return Operands(num_experts, num_out, length, pack, arguments, own, block_k)


def _columns(form: Form, parts: Parts) -> Operands:
    scales, index = parts[Part.SCALE], parts.get(Part.GROUP_INDEX)
    num_experts, num_groups, num_out = scales.shape
    bits, packing = BITS[form.kind], form.packing
    assert packing is not None
    words = parts[Part.WEIGHT]
    num_in = words.shape[1] * (1 if packing is Packing.AWQ else 32 // bits)
    own = {
        "BITS": bits,
        "PACKING": packing.value,
        "GROUP": num_in // num_groups,
        "ONES": ONES[bits],
        "INDEX_ROWS": 0 if index is None else num_out // index.shape[1],
    }
    arguments = words, scales, parts[Part.ZERO], index, num_groups
    return Operands(num_experts, num_out, num_in, 1, arguments, own, block_k=64)


def _code_of(form: Form, device: torch.device) -> str:
    if form.kind in (Kind.MXFP4, Kind.NVFP4):
        return "fp4"
    if form.kind in (Kind.NF4, Kind.FP4):
        return "table"
    if form.packing is Packing.COMPRESSED_TENSORS:
        return f"uint{BITS[form.kind]}"
    if form.packing is Packing.NONE or form.kind is Kind.BNB8:
        return "int8"
    return _fp8_code(device)


def _fp8_code(device: torch.device) -> str:
    # from compute capability 8.9 on there is an instruction for it
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return "fp8" if has_fp8 else "fp8 in software"
