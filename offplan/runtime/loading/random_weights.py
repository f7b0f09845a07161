"""Random weights of valid stored values, to time a model whose weights are not at hand."""

from collections.abc import Collection, Generator, Mapping
from functools import cache

import torch

from offplan.forms.form import BITS, Component, Kind, WordOrder
from offplan.runtime.forms.reference import ONES
from offplan.runtime.loading.fill import Codes, Target
from offplan.runtime.loading.packed import Matrix

_SPREAD = 0.02
"""Standard deviation of the weights, whatever their form."""
_OF_CODES = {
    Kind.MXFP4: 3.0,
    Kind.NVFP4: 3.0,
    Kind.W4A16: 4.6,
    Kind.W8A16: 74.0,
    Kind.BNB8: 74.0 / 127,
    Kind.NF4: 0.6,
    Kind.FP4: 0.6,
}
"""Standard deviations of what random codes stand for, before they are scaled."""
_LOOKED_UP = (Kind.NF4, Kind.FP4)
"""Kinds whose scales may be codes themselves."""
_FP8_SPREAD = 50.0
"""The same of FP8 codes, which are drawn so that none is beyond the largest, 448."""
_BALANCING = "correction_bias", "expert_bias"
"""How names of biases end that a router adds to choose experts, and training sets to balance them.

Noise there outweighs softmax's shares: every token would choose the same experts."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
"""How names of the input embedding end, and of an output head that is not tied to it."""
_EMBEDDED_SPREAD = 4.0
"""Standard deviation of an input embedding that no head is tied to.

Attention adds about the same vector to all tokens of a text. Beside embeddings as small as other
weights it decides which experts a token chooses. Source: layers of Qwen3-MoE's shape, 8 of 128
experts each. In 12 the next token chose up to 0.98 of a token's experts with 0.02. In 40 it chose
up to 0.66 with 1 and 0.08 with 4, where chance gives 0.06.
"""


class Noise:
    """Random weights: ones for norms, zeros for biases that balance experts, else N(0, 0.02).

    Input embeddings are N(0, 4), so that tokens choose experts evenly.

    Whole numbers that are no codes choose rows of the weight beside them: DeepSeek-V4's ``tid2eid``
    has the experts of each token. All rows are chosen equally often.

    The same block of random numbers is tiled from a different start for each parameter, since
    drawing tens of gigabytes would take minutes; routers and experts still differ from one another.
    Where a plan puts a parameter, and whether it is held packed, changes none of its numbers.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Draw the block; ``names`` are those of all parameters, once for what is packed."""
        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(2**22, generator=generator) * _SPREAD
        self._bfloat16 = self._normal.bfloat16()
        shape = (2**20,)
        self._words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)
        self._words_of_fours = _center_codes(self._words)
        self._starts = {name: number * 1_000_003 for number, name in enumerate(sorted(names))}
        self._is_tied = not any(name.endswith(_HEAD) for name in names)

    def fill(
        self, targets: Mapping[str, Target], destinations: Mapping[str, torch.Tensor]
    ) -> Generator[int, None, None]:
        """Fill the destinations of ``targets`` with valid stored values; yield bytes of each."""

        @cache  # once for each device and type
        def noise_on(device: torch.device, dtype: torch.dtype, is_w4a16: bool) -> torch.Tensor:
            if not dtype.is_floating_point:
                words = self._words_of_fours if is_w4a16 else self._words
                return words.to(device).view(dtype)
            factor = _FP8_SPREAD / _SPREAD if dtype.itemsize == 1 else 1.0
            return (self._normal * factor).to(dtype).to(device)

        for name, target in sorted(targets.items(), key=lambda item: item[0]):
            codes, destination = target.codes, destinations[name]
            if destination.ndim == 1 and "norm" in name:
                destination.fill_(1.0)
            elif name.endswith(_BALANCING):
                destination.zero_()
            elif codes is not None and codes.part is not Component.WEIGHT:
                destination.copy_(_fill_of(codes).to(destination.dtype))
            elif codes is None and not destination.dtype.is_floating_point:
                rows = destinations.get(f"{name.rpartition('.')[0]}.weight")
                count = 1 if rows is None else len(rows)
                destination.view(-1).copy_(torch.arange(destination.numel()) % count)
            else:
                is_w4a16 = codes is not None and codes.form.kind is Kind.W4A16
                noise = noise_on(destination.device, destination.dtype, is_w4a16)
                start = self._starts[name] % noise.numel()
                # as bytes: torch rolls no short floats
                rolled = noise.view(torch.uint8).roll(-start * noise.itemsize).view(noise.dtype)
                if name.endswith(_EMBEDDING) and codes is None and not self._is_tied:
                    rolled = rolled * (_EMBEDDED_SPREAD / _SPREAD)
                for piece in destination.view(-1).split(rolled.numel()):
                    piece.copy_(rolled[: piece.numel()])
            yield destination.nbytes

    def fill_rows(self, matrix: Matrix, start: int, rows: torch.Tensor) -> None:
        """Fill rows of a matrix from this one on, bfloat16 of [rows, in], as ``fill`` would."""
        noise, values = self._bfloat16, rows.view(-1)
        begin = self._starts[matrix.weight] + matrix.first + start * rows.shape[1]
        while len(values):
            piece = noise[begin % len(noise) :][: len(values)]
            values[: len(piece)].copy_(piece)
            values, begin = values[len(piece) :], 0


def _center_codes(words: torch.Tensor) -> torch.Tensor:
    """Make the lowest codes of 4 bits the middle ones: the mean of all is the middle, too.

    Weights whose mean is not zero add one vector to every token: all would choose the same experts.
    """
    words = words.clone()
    for low in range(0, 32, 4):
        words |= ((words >> low) & 15 == 0).int() << (low + 3)
    return words


def _fill_of(codes: Codes) -> torch.Tensor:
    """Return what stands beside codes: scales of the right spread, zeros in the middle."""
    form, part, last = codes.form, codes.part, codes.shape[-1]
    scale = _SPREAD / _OF_CODES.get(form.kind, _FP8_SPREAD)
    if part is Component.ZERO and form.kind in BITS and form.word_order is not WordOrder.NONE:
        bits = BITS[form.kind]
        # a word of those in the middle, as a number of 32 bits that has a sign
        return torch.tensor((1 << (bits - 1)) * ONES[bits], dtype=torch.int64)
    if part is Component.GROUP_INDEX:
        block = form.block or (1, last)
        return torch.arange(last) // block[1]
    if part is Component.CODES:
        return torch.linspace(-1, 1, last)
    if part in (Component.GLOBAL_SCALE, Component.NESTED_CODES):
        return torch.tensor(scale)
    if part is Component.GLOBAL_DIVISOR:
        return torch.tensor(1 / scale)
    if part is Component.NESTED_SCALE or (part is Component.SCALE and form.kind is Kind.NVFP4):
        return torch.tensor(1.0)
    if part is not Component.SCALE or (codes.dtype is torch.uint8 and form.kind in _LOOKED_UP):
        return torch.tensor(0)
    if codes.dtype is torch.uint8:  # exponents of two
        return torch.tensor(scale).log2().round() + 127
    return torch.tensor(scale)
