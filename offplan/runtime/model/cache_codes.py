"""Keys, values and latents as codes of e4m3, each vector with a scale behind its codes.

The scale is the power of two by which the vector's largest element comes to 224 to 448, e4m3's
largest value. So values are code times scale without rounding, in any type that has their range.
"""

import torch

from offplan.row_cache import SCALE_BYTES

CODES = torch.float8_e4m3fn
_EXPONENT_BITS = 23
"""Bits behind the exponent of a float32."""
_BELOW_NEXT = 0x1FFFFF
"""Added to the bits of a float32, carries into the exponent beyond 1.75 times a power of two."""
_SHIFTED = 8
"""Exponent of the power of two below 448."""
_NAN_BITS = 0x7FC00000


def is_coded(kept: torch.Tensor) -> bool:
    """Return True if a cache has codes, uint8 of [..., dim + SCALE_BYTES]."""
    return kept.dtype is torch.uint8


def encode(states: torch.Tensor) -> torch.Tensor:
    """Encode vectors, [..., dim]; returns uint8 of [..., dim + SCALE_BYTES].

    A vector with an infinity or a NaN gets NaN as its scale. Compiled, it is integer arithmetic:
    GPUs before compute capability 8.9 have no conversion that Triton compiles.
    """
    largest = states.abs().amax(-1, keepdim=True).float()
    bits = largest.view(torch.int32)
    exponent = ((bits + _BELOW_NEXT) >> _EXPONENT_BITS) - _SHIFTED
    exponent = exponent.clamp(min=1)
    inverse = ((254 - exponent) << _EXPONENT_BITS).view(torch.float32)
    scaled = states.float() * inverse
    if torch.compiler.is_compiling():
        codes = encode_by_bits(scaled)
    else:
        codes = scaled.to(CODES).view(torch.uint8)
    scale = torch.where(largest.isfinite(), exponent << _EXPONENT_BITS, _NAN_BITS)
    places = torch.arange(0, 8 * SCALE_BYTES, 8, dtype=torch.int32, device=states.device)
    return torch.cat([codes, ((scale >> places) & 0xFF).to(torch.uint8)], -1)


def encode_by_bits(scaled: torch.Tensor) -> torch.Tensor:
    """Round float32 of up to 448 to e4m3 by its bits, half to even; returns uint8.

    Source: OCP 8-bit floating point (2023), E4M3: bias 7, and steps of 2**-9 below 2**-6.
    """
    bits = scaled.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    small = torch.round(scaled.abs() * 2.0**9).to(torch.int32)
    codes = torch.where(magnitude < 0x3C800000, small, rounded - (120 << 3))
    return (codes | ((bits >> 24) & 0x80)).to(torch.uint8)


def scales_of(kept: torch.Tensor) -> torch.Tensor:
    """Return the scales of codes, float32 of [..., 1]: a view."""
    return kept[..., -SCALE_BYTES:].view(torch.float32)


class Scratch:
    """Memory for the values of one layer's codes, which the next layer overwrites."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def expand(
        self, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the values of keys' and values' codes, [batch, heads, tokens, dim] of a ``dtype``.

        What an earlier call made is gone.
        """
        memory, made = self.memory.view(dtype), []
        for kept in (keys, values):
            shape = *kept.shape[:-1], kept.shape[-1] - SCALE_BYTES
            size = torch.Size(shape).numel()
            part, memory = memory[:size].view(shape), memory[size:]
            part.copy_(kept[..., :-SCALE_BYTES].view(CODES)).mul_(scales_of(kept))
            made.append(part)
        return made[0], made[1]
