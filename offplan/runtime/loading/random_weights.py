"""Random weights of valid stored values, to time a model whose weights are not at hand."""

from collections.abc import Generator, Mapping
from functools import cache

import torch

from offplan.forms.form import Kind, Part
from offplan.runtime.loading.mapping import Codes, Target

_SPREAD = 0.02
"""Standard deviation of the weights, whatever their form."""
_OF_CODES = {Kind.MXFP4: 3.0, Kind.W4A16: 4.6}
"""Standard deviations of what random codes stand for, before they are scaled."""
_FP8_SPREAD = 50.0
"""The same of FP8 codes, which are drawn so that none is beyond the largest, 448."""
_EIGHTS = -0x77777778
"""A word of eight codes of zero in the middle of their range."""


def fill_random(
    targets: Mapping[str, Target], destinations: Mapping[str, torch.Tensor]
) -> Generator[int, None, None]:
    """Fill every destination with random weights: ones for norms, N(0, 0.02) elsewhere.

    The same block of random numbers is tiled from a different start for each tensor, since drawing
    tens of gigabytes would take minutes; routers and experts still differ from one another. Where
    a plan puts a parameter changes none of its numbers. Yields the bytes of each tensor.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2**22, generator=generator) * _SPREAD
    words = torch.randint(-(2**31), 2**31, (2**20,), generator=generator, dtype=torch.int32)

    @cache  # once for each device and type
    def noise_on(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return words.to(device).view(dtype)
        factor = _FP8_SPREAD / _SPREAD if dtype.itemsize == 1 else 1.0
        return (normal * factor).to(dtype).to(device)

    for number, (name, destination) in enumerate(sorted(destinations.items())):
        codes = targets[name].codes
        if destination.ndim == 1 and "norm" in name:
            destination.fill_(1.0)
        elif codes is not None and codes.part is not Part.WEIGHT:
            destination.view(-1).copy_(torch.full((1,), _fill_of(codes)).to(destination.dtype))
        else:
            noise = noise_on(destination.device, destination.dtype)
            start = number * 1_000_003 % noise.numel()
            # as bytes: torch rolls no short floats
            rolled = noise.view(torch.uint8).roll(-start * noise.itemsize).view(noise.dtype)
            for piece in destination.view(-1).split(rolled.numel()):
                piece.copy_(rolled[: piece.numel()])
        yield destination.nbytes


def _fill_of(codes: Codes) -> float:
    """Return what stands beside codes: scales of the right spread, zeros in the middle."""
    if codes.part is Part.ZERO:
        return _EIGHTS
    if codes.part is not Part.SCALE:
        return 0
    scale = _SPREAD / _OF_CODES.get(codes.form.kind, _FP8_SPREAD)
    if codes.dtype is torch.uint8:  # exponents of two
        return 127 + round(torch.log2(torch.tensor(scale)).item())
    return scale
