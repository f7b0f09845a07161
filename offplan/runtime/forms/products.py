"""Launches the kernels that multiply and expand weights in their stored form. CUDA only."""

from typing import Any

import torch
import triton

from offplan.forms.form import Form, Kind, Part
from offplan.runtime.forms import kernels
from offplan.runtime.forms.reference import Parts, block_of, codes_of

MIN_ROWS = 16
"""Rows that a program multiplies at least: tensor cores take no fewer."""
BLOCK_OUT = 64
SPLIT_PROGRAMS = 2048
"""Programs that a product of few rows is split into, at most, by the length of its rows.

Source: 12,288 x 4,096 of FP8 on an H200 took 17 us in four parts of 192 programs each, 24 in one.
"""


def expand_on_gpu(form: Form, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``."""
    codes, scales, own = _prepare(form, parts)
    num_experts, num_out, num_bytes = codes.shape
    out = codes.new_empty(num_experts, num_out, num_bytes * own["PACK"], dtype=dtype)
    block_n, groups, chunk = 8, 16, 16
    grid = triton.cdiv(num_out, block_n), triton.cdiv(num_bytes, groups * chunk), num_experts
    kernels.expand[grid](
        codes, scales, parts.get(Part.ZERO), out, num_out, num_bytes, *scales.shape[1:], **own,
        BLOCK_N=block_n,
        GROUPS=groups,
        CHUNK=chunk,
    )  # fmt: skip
    return out if parts[Part.SCALE].ndim > 2 else out[0]


def multiply_rows(form: Form, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [rows, in], by a weight: [rows, out]."""
    codes, scales, own = _prepare(form, parts, in_words=True)
    block_m = max(MIN_ROWS, min(128, triton.next_power_of_2(len(x))))
    return _multiply(codes, scales, parts, own, x, len(x), None, block_m)


def multiply_pairs(
    form: Form, parts: Parts, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Multiply each pair's row of ``x``, [rows, in], by its expert's weight: [pairs, out].

    ``order`` lists the pairs by their expert, ``starts``, [experts + 1], where each one's begin in
    it. Pairs are dealt out evenly: row r of R serves those from r x pairs / R on.
    """
    codes, scales, own = _prepare(form, parts, in_words=True)
    of_expert = order.numel() // (starts.numel() - 1)
    block_m = max(MIN_ROWS, min(64, triton.next_power_of_2(of_expert)))
    return _multiply(codes, scales, parts, own, x, order.numel(), (order, starts), block_m)


def _multiply(
    codes: torch.Tensor,
    scales: torch.Tensor,
    parts: Parts,
    own: dict[str, Any],
    x: torch.Tensor,
    num_pairs: int,
    pairs: tuple[torch.Tensor, torch.Tensor] | None,
    block_m: int,
) -> torch.Tensor:
    num_experts, num_out, num_elements = codes.shape
    # weights of one word meet inputs of separate planes, which are read in a row
    planes = x.unflatten(-1, (num_elements, own["PACK"])).permute(2, 0, 1).contiguous()
    num_blocks = triton.cdiv(num_pairs, block_m)
    if pairs is not None:  # each expert's last block may be part of one
        num_blocks += min(num_experts, num_pairs)
    of_scale = own["SCALE_ELEMENTS"]
    block_k = min(128, of_scale) if own["PACK"] == 1 else max(32, of_scale)
    programs = triton.cdiv(num_out, BLOCK_OUT) * num_blocks
    splits = max(1, min(4, SPLIT_PROGRAMS // programs, num_elements // (2 * block_k)))
    split = triton.cdiv(triton.cdiv(num_elements, splits), block_k) * block_k
    out = x.new_empty(splits, num_pairs, num_out, dtype=torch.float32 if splits > 1 else x.dtype)
    kernels.multiply[(triton.cdiv(num_out, BLOCK_OUT), num_blocks, splits)](
        planes, codes, scales, parts.get(Part.ZERO), out, *(pairs or (None, None)), num_pairs,
        num_out, num_elements, split, num_pairs // len(x), *scales.shape[1:], num_experts,
        **own,
        EXPERTS=0 if pairs is None else triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_OUT,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


def _prepare(
    form: Form, parts: Parts, *, in_words: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return codes and scales of all experts, [experts, ...], and what the kernels are made for.

    Codes of four bits are given ``in_words`` of eight, else in bytes of two.
    """
    codes, scales = codes_of(parts), parts[Part.SCALE]
    if codes.ndim == 2:
        codes, scales = codes[None], scales[None]
    pack = 1
    if not form.kind.value.startswith("fp8"):
        codes, pack = (codes.view(torch.int32), 8) if in_words else (codes, 2)
    num_out, num_in = codes.shape[1], codes.shape[2] * pack
    high, wide = block_of(form, num_out, num_in, scales.shape[1])
    zero = 0
    if form.kind is Kind.W4A16:
        zero = 1 if Part.ZERO not in parts else 2
    own = {
        "CODE": _code_of(form, codes.device),
        "PACK": pack,
        "IS_EXPONENT": scales.dtype in (torch.uint8, torch.float8_e8m0fnu),
        "ZERO": zero,
        "SCALE_ROWS": high,
        "SCALE_ELEMENTS": wide // pack,
    }
    return codes, scales.view(torch.uint8) if own["IS_EXPONENT"] else scales, own


def _code_of(form: Form, device: torch.device) -> str:
    if form.kind is Kind.MXFP4:
        return "fp4"
    if form.kind is Kind.W4A16:
        return "int4"
    # from compute capability 8.9 on there is an instruction for it
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return "fp8" if has_fp8 else "fp8 in software"
