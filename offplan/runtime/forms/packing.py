"""bfloat16 weights are packed without loss, in plain torch, where they lie."""

import torch
from torch import nn

from offplan.forms.form import BASE_BYTES, MOST_EXPONENT, PATCH_ROWS, Component, patch_reserve
from offplan.runtime.forms.reference import Components, interleave

RUN_WEIGHTS = 2**23
"""Weights that are packed at once, at most: packing takes some 16 bytes of memory for each.

Source: 7.1 GB of Qwen3-8B on an H200, into memory touched before. They were packed at 4.7 GB/s by
2**22, mostly launching, 7.1 by 2**23 and 8.6 by 2**24.
"""


class TooManyEscapes(ValueError):
    """A matrix has more weights other than zero that no code reaches than it has room for."""

    def __init__(self, num_escapes: int, reserve: int) -> None:
        super().__init__(
            f"found {num_escapes} weights that are 2**16 or more, infinite or NaN, "
            f"or too small beside others of their block of {2 * BASE_BYTES}, "
            f"expected at most {reserve}"
        )
        self.num_escapes = num_escapes


def pack(values: torch.Tensor, reserve: int | None = None) -> Components:
    """Pack a matrix, bfloat16 of [out, in]; out is a multiple of 64, in of 8.

    The parts lie on its device, which is waited for. ``reserve`` is the number of patches that have
    room, a whole matrix's if left out. Raises TooManyEscapes.
    """
    num_out, num_in = values.shape
    low, high = values.view(torch.uint8).view(num_out, num_in, 2).unbind(-1)
    weight = (high & 0x80).bitwise_or_(low & 0x7F)
    exponents = (high << 1).bitwise_or_(low >> 7)
    base = find_bases(exponents)
    spread = base.repeat_interleave(BASE_BYTES, 1)[:, None, : num_in // 2]
    # modulo 256: what is below the base is above 15
    codes = exponents.view(num_out, 2, num_in // 2).sub_(spread)
    escapes = (codes - 1) >= 15
    # zeros among them keep their sign, and subnormal numbers of a base of 0 their mantissa
    patched = (escapes & ((codes | spread) != 0)).view(num_out, num_in)
    patched.logical_and_(values.view(torch.int16) << 1)
    codes.masked_fill_(escapes, 0)
    weight.masked_fill_(patched, 0)
    places = patched.view(-1).nonzero().view(-1)
    if reserve is None:
        reserve = patch_reserve(num_out, num_in)
    if len(places) > reserve:
        raise TooManyEscapes(len(places), reserve)
    patches = torch.zeros(reserve, 2, dtype=torch.int32, device=values.device)
    patches[: len(places), 0] = places.to(torch.int32)
    patches[: len(places), 1] = values.view(torch.int16).view(-1)[places].to(torch.int32) & 0xFFFF
    counts = patched.view(-1, PATCH_ROWS * num_in).sum(1)
    ends = counts.cumsum(0)
    return {
        Component.WEIGHT: interleave(weight.view(num_out, 2, -1)).view(num_out, num_in),
        Component.EXPONENT: interleave(codes[:, 0] | (codes[:, 1] << 4)),
        Component.BASE: base.unflatten(0, (-1, PATCH_ROWS)).mT.flatten(1),
        Component.PATCHES: patches,
        Component.PATCH_BLOCKS: torch.stack((ends - counts, ends), 1).to(torch.int32),
    }


def find_bases(exponents: torch.Tensor) -> torch.Tensor:
    """Return the base of each block of biased exponents, uint8 of [out, in]: [out, blocks].

    The largest exponent of a block that is no patch by itself has code 15.
    """
    num_out, num_in = exponents.shape
    tops = exponents.masked_fill(exponents > MOST_EXPONENT, 0).view(num_out, 2, num_in // 2).amax(1)
    tops = nn.functional.pad(tops, (0, -tops.shape[1] % BASE_BYTES))
    return tops.view(num_out, -1, BASE_BYTES).amax(2).clamp_(min=15).sub_(15)


def pack_in_runs(values: torch.Tensor, device: torch.device | None = None) -> Components:
    """Pack a matrix, bfloat16 of [out, in], RUN_WEIGHTS at a time; ``can_pack`` says which.

    There is room for as many patches as there are, and for those that plans reserve. The parts lie
    on ``device``, or where the matrix does. Beside matrix and parts this takes the memory of
    packing one run.
    """
    num_out, num_in = values.shape
    step = run_rows(num_in)
    if num_out <= step:
        return _pack_all(values.to(device))
    # each run goes to its place: joined at the end, all would be there twice
    whole: Components = {}
    patches, blocks, num_patches = [], [], 0
    for start in range(0, num_out, step):
        rows = values[start : start + step].to(device)
        run = _pack_all(rows)
        for part in (Component.WEIGHT, Component.EXPONENT, Component.BASE):
            rows_each = len(rows) // len(run[part])  # bases are of 64 rows together
            if part not in whole:
                whole[part] = run[part].new_empty(num_out // rows_each, *run[part].shape[1:])
            whole[part][start // rows_each :][: len(run[part])] = run[part]
        ends = run[Component.PATCH_BLOCKS]
        own = run[Component.PATCHES][: int(ends[-1, 1])].clone()  # without the room of the run
        own[:, 0] += start * num_in
        patches.append(own)
        blocks.append(ends + num_patches)
        num_patches += len(own)
    missing = max(0, patch_reserve(num_out, num_in) - num_patches)
    whole[Component.PATCHES] = nn.functional.pad(torch.cat(patches), (0, 0, 0, missing))
    whole[Component.PATCH_BLOCKS] = torch.cat(blocks)
    return whole


def run_rows(num_in: int) -> int:
    """Return the rows of ``num_in`` weights that are packed at once: whole blocks of rows."""
    return max(1, RUN_WEIGHTS // (num_in * PATCH_ROWS)) * PATCH_ROWS


def _pack_all(values: torch.Tensor) -> Components:
    """Pack rows with room for all patches that they have."""
    try:
        return pack(values)
    except TooManyEscapes as error:
        return pack(values, error.num_escapes)
