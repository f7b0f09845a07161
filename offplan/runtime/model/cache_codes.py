"""Keys, values and latents as codes of FP8 (E3M4), each vector with a scale behind its codes.

The scale is the power of two by which the vector's largest element comes to 15.5 to 31, E3M4's
largest value. So values are code times scale without rounding, in any type that has their range.
E3M4 has a bit of mantissa more than E4M3, whose range a vector with a scale of its own does not
need. Rounding keys to E4M3 made perplexities 1 % larger. Shen and others (arXiv 2309.14592) prefer
E4M3 for language models, with one scale for all activations of a tensor. All codes are numbers.
"""

from typing import NamedTuple

import torch

from offplan.row_cache import SCALE_BYTES

EXPONENT_BITS = 23
"""Bits behind the exponent of a float32."""
BELOW_NEXT = 0x7FFFF
"""Added to the bits of a float32, carries into the exponent beyond 31/16 of a power of two."""
SHIFTED = 4
"""Exponent of the power of two below 31."""
NAN_BITS = 0x7FC00000
LEAST_NORMAL_BITS = 0x3400
"""Bits of a float16 of 2**-2, below which E3M4 has steps of 2**-6."""


class Bits(NamedTuple):
    """How the bits of a code, moved, become those of a float which lacks a power of two."""

    type: torch.dtype
    """Whole numbers of as many bits as the float has."""
    shift: int
    """Bits that a code is moved by: from a mantissa of four bits to the float's."""
    power: int
    """Power of two that a code lacks: a factor of its own, since scales leave it no room."""

    @property
    def mask(self) -> int:
        """Bits that remain: the sign, as of the whole number, and those of the code."""
        return (0x7F << self.shift) - (1 << (8 * self.type.itemsize - 1))


BITS = {
    torch.bfloat16: Bits(torch.int16, 3, 124),
    torch.float16: Bits(torch.int16, 6, 12),
    torch.float32: Bits(torch.int32, 19, 124),
}


def is_coded(kept: torch.Tensor) -> bool:
    """Return True if a cache has codes, uint8 of [..., dim + SCALE_BYTES]."""
    return kept.dtype is torch.uint8


def encode(states: torch.Tensor) -> torch.Tensor:
    """Encode vectors, [..., dim]; returns uint8 of [..., dim + SCALE_BYTES].

    A vector with an infinity or a NaN gets NaN as its scale.
    """
    largest = states.abs().amax(-1, keepdim=True).float()
    bits = largest.view(torch.int32)
    exponent = ((bits + BELOW_NEXT) >> EXPONENT_BITS) - SHIFTED
    exponent = exponent.clamp(min=1)
    inverse = ((254 - exponent) << EXPONENT_BITS).view(torch.float32)
    codes = encode_by_bits((states.float() * inverse).half())
    scale = torch.where(largest.isfinite(), exponent << EXPONENT_BITS, NAN_BITS)
    places = torch.arange(0, 8 * SCALE_BYTES, 8, dtype=torch.int32, device=states.device)
    return torch.cat([codes, ((scale >> places) & 0xFF).to(torch.uint8)], -1)


def encode_by_bits(scaled: torch.Tensor) -> torch.Tensor:
    """Round float16 of up to 31 to E3M4 by its bits, half to even; returns uint8.

    E3M4 has a bias of 3, no infinity and no NaN.
    """
    bits = scaled.view(torch.int16)
    magnitude = bits & 0x7FFF
    rounded = (magnitude + 0x1F + ((magnitude >> 6) & 1)) >> 6
    small = torch.round(scaled.abs() * 2.0**6).to(torch.int16)
    codes = torch.where(magnitude < LEAST_NORMAL_BITS, small, rounded - (12 << 4))
    return (codes | ((bits >> 8) & 0x80)).to(torch.uint8)


def decode_to(made: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the values of codes, uint8 of [..., dim], over floats of their shape."""
    kind = BITS[made.dtype]
    bits = made.view(kind.type)
    bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(kind.shift).bitwise_and_(kind.mask)
    made.mul_(2.0**kind.power).mul_(scales)


def scales_of(kept: torch.Tensor) -> torch.Tensor:
    """Return the scales of codes, float32 of [..., 1]: a view."""
    return kept[..., -SCALE_BYTES:].view(torch.float32)
