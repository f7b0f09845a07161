"""What the kernels are given of a weight in its stored form, and what they are made for."""

from typing import Any, NamedTuple

import torch

from offplan.forms.form import BASE_BYTES, BITS, Component, Form, Kind, WordOrder
from offplan.runtime.forms.reference import (
    Components,
    block_of,
    codes_of,
    has_powers,
    nested_scales,
)


class Weight(NamedTuple):
    """The tensors of a weight that is stored in rows, and the sizes of its scales."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    whole: torch.Tensor | None
    """Each matrix's scale of its scales."""
    table: torch.Tensor | None
    """What codes stand for, where that is looked up."""
    scale_rows: int
    scale_columns: int


class Layout(NamedTuple):
    """What the kernels of rows are compiled for."""

    code: str
    """How numbers are made of codes."""
    pack: int
    """Weights in an element: 1 of 8 bits, 8 of 4."""
    scale: str
    """What scales are: "float", "exponent" of two, a row's "largest", or a code."""
    whole: str
    """What they are to be made of by those of matrices: "factor", "divisor" or nothing."""
    global_rows: int
    """Rows of such a matrix."""
    zero: str
    """What is subtracted from codes: "words", "bytes", the "middle" or nothing."""
    rows: int
    elements: int
    """Rows, and elements of each, that share a scale."""
    eights: bool = False
    """True if a row's elements are a multiple of 8. Triton sees multiples of 16 alone."""


class Operands(NamedTuple):
    """A weight, or those of all experts, as arguments of kernels."""

    num_experts: int
    num_out: int
    length: int
    """Elements along a row: bytes or words."""
    pack: int
    """Weights in such an element."""
    arguments: tuple[Any, ...]
    """The tensors that it is stored in, and their sizes."""
    constants: dict[str, Any]
    block_k: int
    """Elements that a product takes at once, at most."""
    element_bytes: int = 4
    """Bytes that are stored for such an element, at most."""


def is_stacked(form: Form, parts: Components) -> bool:
    """Return True if parts are those of experts' weights, be it of one, not of a weight alone."""
    return parts[Component.WEIGHT if form.kind is Kind.PACKED else Component.SCALE].ndim > 2


def operands_of(form: Form, parts: Components) -> Operands:
    """Prepare a weight for the kernels; nothing but views and nested scales is made."""
    # what there is one of is taken as one expert's
    if not is_stacked(form, parts):
        parts = {part: value[None] if value.ndim > 1 else value for part, value in parts.items()}
    if form.kind is Kind.PACKED:
        return _packed(parts)
    return _rows(form, parts)


def _packed(parts: Components) -> Operands:
    codes, exponents, patches = (
        parts[part].view(torch.int32)
        for part in (Component.WEIGHT, Component.EXPONENT, Component.PATCHES)
    )
    num_experts, num_out, length = exponents.shape
    bounds, reserve = parts[Component.PATCH_BLOCKS], patches.shape[1]
    arguments = codes, exponents, parts[Component.BASE], patches, bounds, reserve
    constants = {"WHOLE": 4 * length % BASE_BYTES == 0}
    # an element is a word of exponents, which goes with two of codes
    return Operands(num_experts, num_out, length, 8, arguments, constants, 32, element_bytes=12)


def _rows(form: Form, parts: Components) -> Operands:
    if form.kind in (Kind.NF4, Kind.FP4):
        parts = parts | {Component.SCALE: nested_scales(parts)}
    codes, scales = codes_of(parts), parts[Component.SCALE]
    code, pack = _code_of(form, codes.device), 1
    if code in ("fp4", "table", "uint4"):
        codes, pack = codes.view(torch.int32), 8
    num_experts, num_out, length = codes.shape
    high, wide = block_of(form, num_out, length * pack, scales)
    whole = parts.get(Component.GLOBAL_SCALE, parts.get(Component.GLOBAL_DIVISOR))
    zero, scale, of_whole = "", "float", ""
    if form.word_order is WordOrder.COMPRESSED_TENSORS:
        zero = "words" if Component.ZERO in parts else "middle"
    elif Component.ZERO in parts:
        zero = "bytes"
    if form.kind is Kind.NVFP4:
        of_whole = "factor" if Component.GLOBAL_SCALE in parts else "divisor"
        scale = _fp8_code(codes.device)
    elif has_powers(form, scales):
        scale = "exponent"
    elif form.kind is Kind.BNB8:
        scale = "largest"
    if scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
    global_rows = 1 if whole is None else num_out // whole.shape[1]
    elements, eights = wide // pack, length % 8 == 0
    layout = Layout(code, pack, scale, of_whole, global_rows, zero, high, elements, eights)
    tensors = codes, scales, parts.get(Component.ZERO), whole, parts.get(Component.CODES)
    arguments = (Weight(*tensors, *scales.shape[1:]),)
    # a tile of bytes lies under one scale, one of words under one or several whole ones
    block_k = min(128, 1 << (wide.bit_length() - 1)) if pack == 1 else 64
    return Operands(num_experts, num_out, length, pack, arguments, {"FORM": layout}, block_k)


def _code_of(form: Form, device: torch.device) -> str:
    if form.kind in (Kind.MXFP4, Kind.NVFP4):
        return "fp4"
    if form.kind in (Kind.NF4, Kind.FP4):
        return "table"
    if form.word_order is WordOrder.COMPRESSED_TENSORS:
        return f"uint{BITS[form.kind]}"
    if form.word_order is WordOrder.NONE or form.kind is Kind.BNB8:
        return "int8"
    return _fp8_code(device)


def _fp8_code(device: torch.device) -> str:
    # from compute capability 8.9 on there is an instruction for it
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return "fp8" if has_fp8 else "fp8 in software"
