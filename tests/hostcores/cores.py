"""Weights of every form that the cores multiply, and what they stand for."""

import os

import pytest
import torch

from offplan.errors import OffplanError
from offplan.forms.form import RAW, Component, Form, Kind, WordOrder
from offplan.runtime.forms import reference
from offplan.runtime.forms.packing import pack
from offplan.runtime.forms.reference import Components
from offplan.runtime.host_cores import cores

_WORDS = WordOrder.COMPRESSED_TENSORS
FORMS = {
    "bf16": RAW,
    "fp8": Form(Kind.FP8_BLOCK, (128, 128)),
    "fp8 by powers": Form(Kind.FP8_BLOCK, (128, 128)),
    "fp8 channel": Form(Kind.FP8_CHANNEL),
    "fp8 tensor": Form(Kind.FP8_TENSOR),
    "mxfp4": Form(Kind.MXFP4, (1, 32)),
    "nvfp4": Form(Kind.NVFP4, (1, 16)),
    "nvfp4 divided": Form(Kind.NVFP4, (1, 16)),
    "int4": Form(Kind.W4A16, (1, 128), _WORDS),
    "int4 of 64": Form(Kind.W4A16, (1, 64), _WORDS),
    "int4 of 32": Form(Kind.W4A16, (1, 32), _WORDS),
    "int4 with zeros": Form(Kind.W4A16, (1, 128), _WORDS),
    "int4 of 64 with zeros": Form(Kind.W4A16, (1, 64), _WORDS),
    "int4 of 32 with zeros": Form(Kind.W4A16, (1, 32), _WORDS),
    "int4 by rows": Form(Kind.W4A16, (1, 0), _WORDS),
    "int8": Form(Kind.W8A16, (1, 128), _WORDS),
    "int8 of 256 with zeros": Form(Kind.W8A16, (1, 256), _WORDS),
    "bytes": Form(Kind.W8A16, (1, 0), WordOrder.NONE),
    "bytes with zeros": Form(Kind.W8A16, (1, 128), WordOrder.NONE),
    "bnb8": Form(Kind.BNB8),
    "packed": Form(Kind.PACKED),
}
"""A group of 0 is as wide as the matrix."""


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def random_fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 60).to(torch.float8_e4m3fn)


def make_weight(name: str, num_out: int, num_in: int, *lead: int) -> tuple[Form, Components]:
    """Draw a weight, or those of so many experts, with every code that its form has."""
    form = FORMS[name]
    if form.block is not None and form.block[1] == 0:
        form = form._replace(block=(1, num_in))
    if lead:
        each = [make_weight(name, num_out, num_in)[1] for _ in range(lead[0])]
        return form, {part: torch.stack([parts[part] for parts in each]) for part in each[0]}
    return form, _MAKERS[form.kind](name, form, num_out, num_in)


def _make_raw(name: str, form: Form, num_out: int, num_in: int) -> Components:
    return {Component.WEIGHT: (torch.randn(num_out, num_in) * 0.02).to(torch.bfloat16)}


def _make_packed(name: str, form: Form, num_out: int, num_in: int) -> Components:
    values = (torch.randn(num_out, num_in) * 0.02).to(torch.bfloat16)
    values[0, 3], values[1, 5], values[2, 7], values[5] = 0.0, -0.0, 1e-9, 0.0
    values[num_out - 1, num_in - 1] = values[num_out // 2 - 1, 9] = 3e5  # patches
    return pack(values)


def _make_fp8(name: str, form: Form, num_out: int, num_in: int) -> Components:
    shape = {Kind.FP8_CHANNEL: (num_out, 1), Kind.FP8_TENSOR: (1, 1)}.get(
        form.kind, (-(-num_out // 128), -(-num_in // 128))
    )
    scale = torch.rand(shape) * 1e-3 + 1e-4
    if "powers" in name:
        scale = torch.randint(114, 118, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scale = scale.to(torch.bfloat16) if form.kind is Kind.FP8_CHANNEL else scale
    return {Component.WEIGHT: random_fp8(num_out, num_in), Component.SCALE: scale}


def _make_fp4(name: str, form: Form, num_out: int, num_in: int) -> Components:
    codes = random_bytes(num_out, num_in // 2)
    if form.kind is Kind.MXFP4:  # the bytes of each block apart
        scales = torch.randint(117, 124, (num_out, num_in // 32), dtype=torch.uint8)
        return {Component.WEIGHT: codes.view(num_out, -1, 16), Component.SCALE: scales}
    whole = Component.GLOBAL_DIVISOR if "divided" in name else Component.GLOBAL_SCALE
    scales = (torch.rand(num_out, num_in // 16) * 100).to(torch.float8_e4m3fn)
    return {
        Component.WEIGHT: codes,
        Component.SCALE: scales,
        whole: torch.rand(2, 1) + 0.5,
    }  # two, joined


def _make_whole(name: str, form: Form, num_out: int, num_in: int) -> Components:
    assert form.block is not None
    groups = -(-num_in // form.block[1])
    per = 8 if form.kind is Kind.W4A16 else 4
    scale = (torch.rand(num_out, groups) * 1e-2).to(torch.bfloat16 if per == 8 else torch.float16)
    if form.word_order is WordOrder.NONE:
        codes = random_bytes(num_out, num_in).view(torch.int8)
        zeros = random_bytes(num_out, groups).view(torch.int8)
    else:
        codes = random_bytes(num_out, num_in * 4 // per).view(torch.int32)
        zeros = random_bytes(num_out // per, groups * 4).view(torch.int32)
    parts = {Component.WEIGHT: codes, Component.SCALE: scale}
    return parts | ({Component.ZERO: zeros} if "zeros" in name else {})


def _make_bnb8(name: str, form: Form, num_out: int, num_in: int) -> Components:
    codes = random_bytes(num_out, num_in).view(torch.int8)
    return {Component.WEIGHT: codes, Component.SCALE: torch.rand(num_out, 1)}


_MAKERS = {
    Kind.RAW: _make_raw,
    Kind.FP8_BLOCK: _make_fp8,
    Kind.FP8_CHANNEL: _make_fp8,
    Kind.FP8_TENSOR: _make_fp8,
    Kind.MXFP4: _make_fp4,
    Kind.NVFP4: _make_fp4,
    Kind.W4A16: _make_whole,
    Kind.W8A16: _make_whole,
    Kind.BNB8: _make_bnb8,
    Kind.PACKED: _make_packed,
}


def values_of(form: Form, parts: Components) -> torch.Tensor:
    """Return what a weight stands for in float64; whole numbers are not rounded in between."""
    if form is RAW:
        return parts[Component.WEIGHT].double()
    if form.word_order is not None:
        parts = parts | {Component.SCALE: parts[Component.SCALE].float()}
    return reference.expand(form, parts, torch.float32).double()


def require_cores() -> None:
    """Skip a module where the kernels cannot be built; in CI that fails."""
    try:
        cores.load()
    except OffplanError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error), allow_module_level=True)
