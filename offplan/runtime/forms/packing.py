"""bfloat16 weights are packed without loss, in plain torch, where they lie."""

import torch

from offplan.forms.form import PATCH_ROWS, Part, patch_reserve
from offplan.runtime.forms.reference import ESCAPE, Parts


class TooManyEscapes(ValueError):
    """A matrix has more weights, zeros apart, that no code of their row reaches than have room."""

    def __init__(self, num_escapes: int, reserve: int) -> None:
        super().__init__(
            f"found {num_escapes} weights other than zero whose exponents are {ESCAPE} or more "
            f"below their row's largest, expected at most {reserve}"
        )
        self.num_escapes = num_escapes
        self.reserve = reserve


def pack(values: torch.Tensor, reserve: int | None = None) -> Parts:
    """Pack a matrix, bfloat16 of [out, in]; out is a multiple of 64, in of 8.

    The parts lie on its device, which is waited for. ``reserve`` is the number of patches that have
    room, a whole matrix's if left out. Raises TooManyEscapes.
    """
    num_out, num_in = values.shape
    low, high = values.view(torch.uint8).view(num_out, num_in, 2).unbind(-1)
    weight = (high & 0x80).bitwise_or_(low & 0x7F)
    exponents = (high << 1).bitwise_or_(low >> 7)
    base = exponents.amax(1, keepdim=True)
    codes = torch.sub(base, exponents, out=exponents)
    # zeros among them keep their sign, and need no patch
    escapes = (codes >= ESCAPE).logical_and_(values.view(torch.int16) << 1)
    codes.clamp_(max=ESCAPE)
    weight.masked_fill_(escapes, 0)
    places = escapes.view(-1).nonzero().view(-1)
    if reserve is None:
        reserve = patch_reserve(num_out, num_in)
    if len(places) > reserve:
        raise TooManyEscapes(len(places), reserve)
    patches = torch.zeros(reserve, 2, dtype=torch.int32, device=values.device)
    patches[: len(places), 0] = places.to(torch.int32)
    patches[: len(places), 1] = values.view(torch.int16).view(-1)[places].to(torch.int32) & 0xFFFF
    counts = escapes.view(-1, PATCH_ROWS * num_in).sum(1)
    ends = counts.cumsum(0)
    return {
        Part.WEIGHT: weight,
        Part.EXPONENT: codes[:, : num_in // 2] | (codes[:, num_in // 2 :] << 4),
        Part.BASE: base,
        Part.PATCHES: patches,
        Part.PATCH_BLOCKS: torch.stack((ends - counts, ends), 1).to(torch.int32),
    }
