"""bfloat16 weights are packed without loss, in plain torch, where they lie."""

import torch

from offplan.forms.form import PATCH_ROWS, Part, patch_reserve
from offplan.runtime.forms.reference import ESCAPE, Parts


class TooManyEscapes(ValueError):
    """A matrix has more weights that are too small for their row's codes than are reserved for."""

    def __init__(self, num_escapes: int, reserve: int) -> None:
        super().__init__(
            f"found {num_escapes} weights whose exponents are {ESCAPE} or more below their row's "
            f"largest, expected at most {reserve}"
        )
        self.num_escapes = num_escapes
        self.reserve = reserve


def pack(values: torch.Tensor) -> Parts:
    """Pack a matrix, bfloat16 of [out, in]; out is a multiple of 64, in of 8.

    The parts lie on its device, which is waited for. Raises TooManyEscapes.
    """
    num_out, num_in = values.shape
    bits = values.view(torch.int16)
    signs = (bits >> 8) & 0x80
    exponents = (bits >> 7) & 0xFF
    base = exponents.amax(1, keepdim=True)
    codes = base - exponents
    escapes = codes >= ESCAPE
    codes = codes.clamp_(max=ESCAPE).to(torch.uint8)
    weight = (signs | (bits & 0x7F)).to(torch.uint8).masked_fill_(escapes, 0)
    places = escapes.view(-1).nonzero().view(-1)
    reserve = patch_reserve(num_out, num_in)
    if len(places) > reserve:
        raise TooManyEscapes(len(places), reserve)
    patches = torch.zeros(reserve, 2, dtype=torch.int32, device=values.device)
    patches[: len(places), 0] = places.to(torch.int32)
    patches[: len(places), 1] = bits.view(-1)[places].to(torch.int32) & 0xFFFF
    counts = escapes.view(-1, PATCH_ROWS * num_in).sum(1)
    ends = counts.cumsum(0)
    return {
        Part.WEIGHT: weight,
        Part.EXPONENT: codes[:, : num_in // 2] | (codes[:, num_in // 2 :] << 4),
        Part.BASE: base.to(torch.uint8),
        Part.PATCHES: patches,
        Part.PATCH_BLOCKS: torch.stack((ends - counts, ends), 1).to(torch.int32),
    }
