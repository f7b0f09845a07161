"""Random weights in every stored form, as they are in files, for tests of kernels."""

import torch

from offplan.forms.form import Component, Form, Kind, WordOrder
from offplan.runtime.forms import reference
from tests.runtime.interpreted import INTERPRETED

# the interpreter rounds bfloat16 in a way of its own
DEVICE, DTYPES = ("cpu", [torch.float16]) if INTERPRETED else ("cuda", [torch.bfloat16, torch.half])
NUM_OUT, NUM_IN = (128, 256) if INTERPRETED else (320, 768)
"""Outputs and inputs of a weight, where a test sets no others here."""

PACKED = Form(Kind.PACKED)
FORMS = {
    "fp8": Form(Kind.FP8_BLOCK, (128, 128)),
    "fp8 channel": Form(Kind.FP8_CHANNEL),
    "fp8 by powers": Form(Kind.FP8_BLOCK, (128, 128)),
    "mxfp8 by powers": Form(Kind.FP8_BLOCK, (1, 32)),
    "mxfp4": Form(Kind.MXFP4, (1, 32)),
    "nvfp4": Form(Kind.NVFP4, (1, 16)),
    "nvfp4 divided": Form(Kind.NVFP4, (1, 16)),
    "int4": Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    "int4 of 32": Form(Kind.W4A16, (1, 32), WordOrder.COMPRESSED_TENSORS),
    "int4 about 8": Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    "int8": Form(Kind.W8A16, (1, 64), WordOrder.COMPRESSED_TENSORS),
    "int8 about 128": Form(Kind.W8A16, (1, NUM_IN), WordOrder.COMPRESSED_TENSORS),
    "bytes": Form(Kind.W8A16, (1, NUM_IN), WordOrder.NONE),
    "bytes with zeros": Form(Kind.W8A16, (1, 32), WordOrder.NONE),
    "gptq": Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    "gptq of 8 bits": Form(Kind.W8A16, (1, 32), WordOrder.GPTQ),
    "gptq v2": Form(Kind.W4A16, (1, 64), WordOrder.GPTQ_V2),
    "gptq in order": Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    "gptq of small groups in order": Form(Kind.W4A16, (1, 32), WordOrder.GPTQ),
    "gptq of 256 in order": Form(Kind.W4A16, (1, 256), WordOrder.GPTQ),
    "awq": Form(Kind.W4A16, (1, 128), WordOrder.AWQ),
    "bnb8": Form(Kind.BNB8),
    "nf4": Form(Kind.NF4),
    "nf4 nested": Form(Kind.NF4),
    "packed": PACKED,
}
FEW = [
    *(
        "fp8",
        "fp8 channel",
        "mxfp8 by powers",
        "mxfp4",
        "nvfp4",
        "int4",
        "int8",
        "bytes with zeros",
    ),
    *("gptq", "gptq in order", "awq", "nf4 nested", "packed"),
]
"""One for each way through a kernel: all forms are expanded and multiplied by a matrix's rows."""


def few_out(name: str) -> int:
    """Count outputs where a kernel takes eight at most at a time, or products need no tile's edge.

    Packed weights are in whole blocks of 64.
    """
    return NUM_OUT if not INTERPRETED else 64 if FORMS[name] is PACKED else 16


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=DEVICE)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def make_parts(name: str, *lead: int) -> dict[Component, torch.Tensor]:
    """Random codes, every one of them, with scales: of one weight, or of so many experts."""
    form = FORMS[name]
    groups = -(-NUM_IN // form.block[1]) if form.block else 1
    if form.is_by_columns:
        return _make_columns(form, lead, groups, "order" not in name)
    if form.kind in (Kind.W4A16, Kind.W8A16):
        per, scale = (8 if form.kind is Kind.W4A16 else 4), random(*lead, NUM_OUT, groups)
        if form.word_order is WordOrder.NONE:
            codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.int8)
            zeros = random_bytes(*lead, NUM_OUT, groups).view(torch.int8)
            has_zeros = "zeros" in name
        else:
            codes = random_words(*lead, NUM_OUT, NUM_IN // per)
            zeros = random_words(*lead, NUM_OUT // per, groups)
            has_zeros = "about" not in name
        parts = {Component.WEIGHT: codes, Component.SCALE: scale.to(DTYPES[0])}
        return parts | ({Component.ZERO: zeros} if has_zeros else {})
    if form.kind is Kind.MXFP4:
        shape = (*lead, NUM_OUT, groups)
        scales = torch.randint(0, 250, shape, dtype=torch.uint8, device=DEVICE)
        return {Component.WEIGHT: random_bytes(*shape, 16), Component.SCALE: scales}
    if form.kind is Kind.NVFP4:
        part = Component.GLOBAL_DIVISOR if "divided" in name else Component.GLOBAL_SCALE
        return {
            Component.WEIGHT: random_bytes(*lead, NUM_OUT, NUM_IN // 2),
            Component.SCALE: random(*lead, NUM_OUT, groups).to(torch.float8_e4m3fn),
            part: random(*lead, 2, 1).abs() + 0.1,  # of two that were joined
        }
    if form.kind is Kind.BNB8:
        codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.int8)
        return {Component.WEIGHT: codes, Component.SCALE: random(*lead, NUM_OUT, 1)}
    if form.kind is Kind.NF4:
        return _make_nf4(is_nested="nested" in name)
    if form is PACKED:
        values = random(*lead, NUM_OUT, NUM_IN) * random(*lead, NUM_OUT, 1)
        return pack_each(values.to(torch.bfloat16))
    high, wide = form.block or (1, NUM_IN)
    shape = (*lead, -(-NUM_OUT // high), NUM_IN // wide)
    scale = random(*shape)
    if "powers" in name:
        scale = torch.randint(0, 250, shape, dtype=torch.uint8, device=DEVICE)
        scale = scale if high == 1 else scale.view(torch.float8_e8m0fnu)
    codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.float8_e4m3fn)
    return {Component.WEIGHT: codes, Component.SCALE: scale}


def pack_each(values: torch.Tensor) -> dict[Component, torch.Tensor]:
    """Pack a weight, or those of experts, whatever their bits are."""
    from offplan.runtime.forms.packing import pack

    if values.ndim == 2:
        return pack(values)
    each = [pack(value) for value in values]
    return {part: torch.stack([parts[part] for parts in each]) for part in each[0]}


def _make_columns(
    form: Form, lead: tuple[int, ...], groups: int, has_index: bool
) -> dict[Component, torch.Tensor]:
    per = 8 if form.kind is Kind.W4A16 else 4
    is_awq = form.word_order is WordOrder.AWQ
    shape = (NUM_IN, NUM_OUT // per) if is_awq else (NUM_IN // per, NUM_OUT)
    parts = {
        Component.WEIGHT: random_words(*lead, *shape),
        Component.SCALE: random(*lead, groups, NUM_OUT).to(torch.float16),
        Component.ZERO: random_words(*lead, groups, NUM_OUT // per),
    }
    if not is_awq and has_index:
        # of one matrix, or of two that were joined
        places = torch.rand(*lead, 2 if lead else 1, NUM_IN).argsort(-1)
        _, size = form.block or (1, NUM_IN)
        parts[Component.GROUP_INDEX] = (places // size).to(DEVICE, torch.int32)
    return parts


def _make_nf4(*, is_nested: bool) -> dict[Component, torch.Tensor]:
    blocks = NUM_OUT, NUM_IN // 64
    parts = {
        Component.WEIGHT: random_bytes(NUM_OUT, NUM_IN // 2),
        Component.SCALE: random_bytes(*blocks) if is_nested else random(*blocks),
        Component.CODES: random(16),
    }
    if is_nested:
        nested = random(-(-blocks[0] * blocks[1] // 256))
        parts |= {Component.NESTED_SCALE: nested, Component.NESTED_CODES: random(256)}
        parts[Component.NESTED_OFFSET] = random(1)
    return parts


def tame(parts: dict[Component, torch.Tensor], form: Form) -> dict[Component, torch.Tensor]:
    """The same with weights of ordinary size and without NaN."""
    if form.kind is Kind.MXFP4:
        return parts | {Component.SCALE: parts[Component.SCALE] % 3 + 126}
    if parts[Component.WEIGHT].dtype is torch.float8_e4m3fn:
        codes, scale = parts[Component.WEIGHT].view(torch.uint8) & 0xBF, parts[Component.SCALE]
        if reference.has_powers(form, scale):
            scale = (scale.view(torch.uint8) % 3 + 126).view(scale.dtype)
        return parts | {Component.WEIGHT: codes.view(torch.float8_e4m3fn), Component.SCALE: scale}
    if form.kind in (Kind.W8A16, Kind.BNB8):
        return parts | {Component.SCALE: parts[Component.SCALE] / 64}
    return parts
