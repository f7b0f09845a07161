"""bfloat16 weights, packed and expanded by plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offplan.forms.form import Form, Kind, Part, patch_reserve
from offplan.runtime.forms.packing import TooManyEscapes, pack
from offplan.runtime.forms.reference import expand
from offplan.runtime.forms.stored import (
    MAX_ROWS,
    PACKED_ROWS,
    StoredLinear,
    hold_stored,
    part_name,
    share_scratch,
)

PACKED = Form(Kind.PACKED)


@given(st.data(), st.sampled_from([(64, 8), (128, 24)]), st.integers(0, 80))
def test_any_bits_come_back_or_are_refused(
    data: st.DataObject, shape: tuple[int, int], num_odd: int
) -> None:
    """Rows of exponents that codes reach, but for so many weights of any bits at all."""
    num_weights = shape[0] * shape[1]
    drawn = data.draw(st.binary(min_size=2 * num_weights, max_size=2 * num_weights))
    bits = torch.frombuffer(bytearray(drawn), dtype=torch.int16).view(shape)
    tops = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=64, max_size=64)))
    tops = tops.repeat(shape[0] // 64)[:, None]
    exponents = (tops - ((bits.int() >> 7) & 0xFF) % 15).clamp(0)
    odd = torch.tensor(data.draw(st.permutations(range(num_weights)))[:num_odd], dtype=torch.long)
    tame = ((bits & -0x7F81) | (exponents << 7)).short().view(-1)
    tame[odd] = bits.view(-1)[odd]
    pruned = data.draw(st.integers(0, 15))  # with both signs, and a row that is pruned whole
    tame = torch.where((bits.view(-1) & 15) < pruned, tame & -0x8000, tame)
    tame.view(shape)[0, : shape[1] * (pruned % 2)] = 0
    values = tame.view(shape).view(torch.bfloat16)
    exponents = (values.view(torch.int16).int() >> 7) & 0xFF
    too_small = exponents < exponents.amax(1, keepdim=True) - 14
    num_escapes = int((too_small & (values != 0)).sum())
    if num_escapes > patch_reserve(*shape):
        with pytest.raises(TooManyEscapes, match=f"found {num_escapes} weights"):
            pack(values)
        return
    parts = pack(values)
    assert int(parts[Part.PATCH_BLOCKS][-1, 1]) == num_escapes
    assert torch.equal(expand(PACKED, parts, torch.bfloat16).view(torch.int16), tame.view(shape))


def test_parts_are_as_they_are_described() -> None:
    values = torch.ones(128, 16, dtype=torch.bfloat16)
    values[64, 1], values[65, 9], values[66, 15] = -1.5, 0.25, 2.0**-20
    values[65, 1], values[65, 10] = -0.0, 0.0
    parts = pack(values)
    assert parts[Part.WEIGHT][64, :2].tolist() == [0, 0xC0]
    assert parts[Part.WEIGHT][65].tolist() == [0, 0x80, *[0] * 14]
    assert parts[Part.EXPONENT][65].tolist() == [0, 0x2F, 0xF0, 0, 0, 0, 0, 0]
    assert parts[Part.EXPONENT][66].tolist() == [0, 0, 0, 0, 0, 0, 0, 0xF0]
    assert parts[Part.BASE].tolist() == [[127]] * 128
    assert parts[Part.PATCHES].shape == (64, 2)
    assert parts[Part.PATCHES][0].tolist() == [66 * 16 + 15, (127 - 20) << 7]
    assert parts[Part.PATCH_BLOCKS].tolist() == [[0, 0], [0, 1]]


def test_fused_matrices_are_those_that_were_packed() -> None:
    """Rows of the second follow those of the first in every part, its patches too."""
    values = [torch.randn(64 * count, 32).to(torch.bfloat16) for count in (1, 2)]
    values[0][3, 4], values[1][100, 5] = 1e-9, -1e-9
    first, second = map(pack, values)
    used, reserve = int(first[Part.PATCH_BLOCKS][-1, 1]), len(first[Part.PATCHES])
    second[Part.PATCHES][:, 0] += values[0].numel()
    second[Part.PATCH_BLOCKS] += reserve
    fused = {part: torch.cat((first[part], second[part])) for part in first}
    fused[Part.PATCHES][used:reserve] = -1  # what is not in use may be anything
    assert torch.equal(expand(PACKED, fused, torch.bfloat16), torch.cat(values))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_rows_are_multiplied_as_if_nothing_was_packed(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    module = nn.Linear(256, 192, device=device, dtype=torch.bfloat16)
    plain = nn.Linear(256, 192, device=device, dtype=torch.bfloat16)
    plain.load_state_dict(module.state_dict())
    parts = pack(module.weight.detach())
    hold_stored(module, "weight", PACKED, parts)
    assert isinstance(module, StoredLinear)
    assert set(module.state_dict()) == {"bias", *(part_name("weight", part) for part in parts)}
    x = torch.randn(MAX_ROWS + 1, 256, device=device).to(torch.bfloat16)
    assert torch.equal(module(x), plain(x))
    share_scratch(nn.ModuleList([module]), torch.bfloat16, torch.device(device))
    assert torch.equal(module(x[: PACKED_ROWS + 1]), plain(x[: PACKED_ROWS + 1]))
