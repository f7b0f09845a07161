"""Kernels that decode and encode codes of a cache, as ``cache_codes`` defines them."""

import torch
import triton
import triton.language as tl

from offplan.row_cache import SCALE_BYTES
from offplan.runtime.model import cache_codes

SCALE_WIDTH = tl.constexpr(SCALE_BYTES)
_BLOCK_VALUES = 4096
"""Values that a program makes; not measured."""
_BLOCK_STORED = 1024
"""Values that a program encodes; not measured."""
_EXPONENT_BITS = tl.constexpr(cache_codes.EXPONENT_BITS)
_BELOW_NEXT = tl.constexpr(cache_codes.BELOW_NEXT)
_SHIFTED = tl.constexpr(cache_codes.SHIFTED)
_NAN_BITS = tl.constexpr(cache_codes.NAN_BITS)
_LEAST_NORMAL_BITS = tl.constexpr(cache_codes.LEAST_NORMAL_BITS)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROUNDING = tl.constexpr(2.0**23)
"""Added to a float32 below 2**22, leaves it rounded to a whole number, half to even."""


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


@triton.jit
def _encode(states, kept, is_vector, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode the vectors at some addresses; write their codes and scales to others."""
    dim = tl.arange(0, BLOCK_D)
    is_value = is_vector[:, None] & (dim < DIM)[None, :]
    values = tl.load(states[:, None] + dim[None, :], mask=is_value, other=0.0).to(tl.float32)
    # by bits, of which a NaN has the most: a maximum of floats would leave it out
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.maximum(((largest + _BELOW_NEXT) >> _EXPONENT_BITS) - _SHIFTED, 1)
    inverse = ((254 - exponent) << _EXPONENT_BITS).to(tl.float32, bitcast=True)
    scaled = (values * inverse[:, None]).to(tl.float16)
    bits = scaled.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    rounded = ((magnitude + 0x1F + ((magnitude >> 6) & 1)) >> 6) - (12 << 4)
    steps = magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 64.0
    small = (steps + _ROUNDING).to(tl.int32, bitcast=True) & 0xFF
    codes = tl.where(magnitude < _LEAST_NORMAL_BITS, small, rounded) | ((bits >> 8) & 0x80)
    tl.store(kept[:, None] + dim[None, :], codes.to(tl.uint8), mask=is_value)
    scale = tl.where(largest < _INFINITY_BITS, exponent << _EXPONENT_BITS, _NAN_BITS)
    tl.store((kept + DIM).to(tl.pointer_type(tl.int32)), scale, mask=is_vector)


@triton.jit(do_not_specialize=["num_vectors"])
def _store(  # type: ignore[no-untyped-def]
    keys,
    values,
    kept_keys,
    kept_values,
    positions,
    of_row,
    of_token,
    from_keys,
    from_values,
    to_keys,
    to_values,
    num_vectors,
    heads,
    new,
    num_kept,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some keys, or some values, of all rows."""
    vector = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_vector = vector < num_vectors
    row, head, token = vector // (heads * new), vector // new % heads, vector % new
    where = positions + row * of_row + token * of_token
    place = tl.load(where, mask=is_vector, other=0) % num_kept
    if tl.program_id(1) == 0:
        states = keys + row * from_keys[0] + head * from_keys[1] + token * from_keys[2]
        kept = kept_keys + row * to_keys[0] + head * to_keys[1]
        _encode(states, kept + place * (KEY + SCALE_WIDTH), is_vector, KEY, BLOCK_K)
    else:
        states = values + row * from_values[0] + head * from_values[1] + token * from_values[2]
        kept = kept_values + row * to_values[0] + head * to_values[1]
        _encode(states, kept + place * (VALUE + SCALE_WIDTH), is_vector, VALUE, BLOCK_V)


def store_codes(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write keys and values into a cache as ``cache_codes.encode`` makes them, bit for bit.

    ``keys`` and ``values`` are [batch, heads, new, dim], kept ones uint8 of [batch, heads, tokens,
    dim + SCALE_BYTES]. ``positions``, int64 on the device, are those of the new tokens: [new], the
    same for every row, or [batch, 1]. A position beyond the tokens kept begins again at the first.
    Runs on the current stream, synchronises nothing.
    """
    batch, heads, new, key_dim = keys.shape
    value_dim = values.shape[3]
    assert values.shape[:3] == keys.shape[:3]
    for kept, dim in ((kept_keys, key_dim), (kept_values, value_dim)):
        assert kept.stride()[2:] == (dim + SCALE_BYTES, 1)
    keys, values = (each if each.stride(3) == 1 else each.contiguous() for each in (keys, values))
    strides = [each.stride()[:3] for each in (keys, values)]
    strides += [each.stride()[:2] for each in (kept_keys, kept_values)]
    each_own = positions.dim() == 2
    of_row, of_token = (positions.stride(0), 0) if each_own else (0, positions.stride(0))
    block_k, block_v = (triton.next_power_of_2(dim) for dim in (key_dim, value_dim))
    num_vectors, block = batch * heads * new, max(1, _BLOCK_STORED // max(block_k, block_v))
    _store[(triton.cdiv(num_vectors, block), 2)](
        keys, values, kept_keys, kept_values, positions, of_row, of_token, *strides, num_vectors,
        heads, new, kept_keys.shape[2], KEY=key_dim, VALUE=value_dim, BLOCK_K=block_k,
        BLOCK_V=block_v, BLOCK=block, num_warps=4,
    )  # fmt: skip


# What is changed is declared: torch writes in place what a compiled layer is given and returns.
_store_operator = torch.library.custom_op(
    "offplan::store_codes",
    store_codes,
    mutates_args=("kept_keys", "kept_values"),
    schema="(Tensor keys, Tensor values, Tensor(a!) kept_keys, Tensor(b!) kept_values, "
    "Tensor positions) -> ()",
)


def store(*tensors: torch.Tensor) -> None:
    """Call ``store_codes``, where torch.compile would analyse it as one operator."""
    (_store_operator if torch.compiler.is_compiling() else store_codes)(*tensors)
