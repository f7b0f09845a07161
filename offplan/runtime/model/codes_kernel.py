"""Kernels that decode codes of a cache, as ``cache_codes`` defines them."""

import torch
import triton
import triton.language as tl

from offplan.row_cache import SCALE_BYTES

SCALE_WIDTH = tl.constexpr(SCALE_BYTES)
_BLOCK_VALUES = 4096
"""Values that a program makes; not measured."""


@triton.jit
def decode(codes, SHIFT: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return floats of codes, which lack a power of two."""
    moved = (codes.to(tl.int8, bitcast=True).to(tl.int32) << SHIFT) & MASK
    if KIND.primitive_bitwidth == 16:
        moved = moved.to(tl.uint16)
    return moved.to(KIND, bitcast=True)


@triton.jit
def load_scales(rows, token, is_token, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales behind the codes of some tokens, float32."""
    pointers = (rows + token * ROW + (ROW - SCALE_WIDTH)).to(tl.pointer_type(tl.float32))
    return tl.load(pointers, mask=is_token, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(  # type: ignore[no-untyped-def]
    kept,
    made,
    heads,
    num_tokens,
    row_stride,
    head_stride,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    POWER: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program for some tokens of a head of a row."""
    pair = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, dim = token < num_tokens, tl.arange(0, BLOCK_D)
    is_value = is_token[:, None] & (dim < DIM)[None, :]
    kept += (pair // heads).to(tl.int64) * row_stride + (pair % heads).to(tl.int64) * head_stride
    made += pair.to(tl.int64) * num_tokens * DIM
    codes = tl.load(
        kept + token[:, None] * (DIM + SCALE_WIDTH) + dim[None, :], mask=is_value, other=0
    )
    scales = load_scales(kept, token, is_token, DIM + SCALE_WIDTH)
    values = decode(codes, SHIFT, MASK, tl.float32) * 2.0**POWER * scales[:, None]
    tl.store(
        made + token[:, None] * DIM + dim[None, :],
        values.to(made.dtype.element_ty),
        mask=is_value,
    )


def expand_codes(kept: torch.Tensor, made: torch.Tensor, shift: int, mask: int, power: int) -> None:
    """Write the values of codes over floats, as ``cache_codes.decode_to`` does, bit for bit.

    ``kept`` is uint8 of [batch, heads, tokens, dim + SCALE_BYTES], in which a token's codes lie
    behind those of the token before. ``made`` is [batch, heads, tokens, dim], contiguous. The
    three numbers say how codes become float32. Runs on the current stream, synchronises nothing.
    """
    batch, heads, num_tokens, dim = made.shape
    assert kept.stride()[2:] == (dim + SCALE_BYTES, 1)
    assert made.is_contiguous()
    width = triton.next_power_of_2(dim)
    block = max(1, _BLOCK_VALUES // width)
    _expand[(triton.cdiv(num_tokens, block), batch * heads)](
        kept, made, heads, num_tokens, *kept.stride()[:2], SHIFT=shift, MASK=mask, POWER=power,
        DIM=dim, BLOCK_D=width, BLOCK_T=block, num_warps=4,
    )  # fmt: skip
