"""bfloat16 weights, packed and expanded by plain torch."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offplan.errors import PlanError
from offplan.forms.form import Component, Form, Kind, patch_reserve
from offplan.kernel_sizes import CODES_ROWS, PACKED_ROWS
from offplan.runtime.forms import packing
from offplan.runtime.forms.packing import TooManyEscapes, pack, pack_in_runs
from offplan.runtime.forms.reference import expand
from offplan.runtime.forms.stored import (
    SharedScratch,
    StoredEmbedding,
    StoredLinear,
    component_name,
    hold_stored,
)

PACKED = Form(Kind.PACKED)


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are made, and how many were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if torch.is_tensor(each)
        }
        for each in tree_leaves(made):
            if not torch.is_tensor(each):
                continue
            storage = each.untyped_storage()
            place = storage.data_ptr()
            if place in given or place in self._sizes:
                continue
            self._sizes[place] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, place, None)
            self.most = max(self.most, sum(self._sizes.values()))
        return made


def as_parameters(parts: dict[Component, torch.Tensor]) -> dict[Component, nn.Parameter]:
    return {part: nn.Parameter(value, requires_grad=False) for part, value in parts.items()}


def needs_patch(bits: torch.Tensor) -> torch.Tensor:
    """Whether weights need patches, by what the form is said to be, block by block."""
    num_in = bits.shape[1]
    exponents, found = (bits.int() >> 7) & 0xFF, torch.zeros(bits.shape, dtype=torch.bool)
    for start in range(0, num_in // 2, 128):
        of_half = torch.arange(start, min(start + 128, num_in // 2))
        columns = torch.cat((of_half, of_half + num_in // 2))
        own = exponents[:, columns]
        base = (own.where(own <= 142, 0).amax(1, keepdim=True) - 15).clamp(min=0)
        codes = own - base
        reached = (codes <= 15) & ((codes > 0) | ((codes == 0) & (base == 0)))
        found[:, columns] = ~reached & ((bits[:, columns] << 1) != 0)
    return found


@pytest.mark.slow
@given(st.data(), st.sampled_from([(64, 8), (128, 24), (64, 520)]), st.integers(0, 80))
def test_any_bits_come_back_or_are_refused(
    data: st.DataObject, shape: tuple[int, int], num_odd: int
) -> None:
    """Rows of exponents that codes reach, but for so many weights of any bits at all."""
    num_weights = shape[0] * shape[1]
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    tops = torch.tensor(data.draw(st.lists(st.integers(0, 142), min_size=64, max_size=64)))
    tops = tops.repeat(shape[0] // 64)[:, None]
    exponents = (tops - ((bits.int() >> 7) & 0xFF) % 15).clamp(0)
    odd = torch.randperm(num_weights, generator=generator)[:num_odd]
    tame = ((bits & -0x7F81) | (exponents << 7)).short().view(-1)
    tame[odd] = bits.view(-1)[odd]
    pruned = data.draw(st.integers(0, 15))  # with both signs, and a row that is pruned whole
    tame = torch.where((bits.view(-1) & 15) < pruned, tame & -0x8000, tame)
    tame.view(shape)[0, : shape[1] * (pruned % 2)] = 0
    values = tame.view(shape).view(torch.bfloat16)
    num_escapes = int(needs_patch(tame.view(shape)).sum())
    if num_escapes > patch_reserve(*shape):
        with pytest.raises(TooManyEscapes, match=f"found {num_escapes} weights"):
            pack(values)
        return
    parts = pack(values)
    assert int(parts[Component.PATCH_BLOCKS][-1, 1]) == num_escapes
    assert torch.equal(expand(PACKED, parts, torch.bfloat16).view(torch.int16), tame.view(shape))


def test_every_bit_pattern_comes_back_as_it_went_in() -> None:
    """NaN with their payloads, infinities, subnormal numbers and zeros of both signs."""
    bits = torch.arange(2**16, dtype=torch.int32).short().view(128, 512)
    shuffled = bits.view(-1)[torch.randperm(2**16)].view(128, 512)
    for each in (bits, bits.T.reshape(128, 512), shuffled):
        parts = pack(each.view(torch.bfloat16), reserve=each.numel())
        assert torch.equal(expand(PACKED, parts, torch.bfloat16).view(torch.int16), each)
        assert int(parts[Component.PATCH_BLOCKS][-1, 1]) == int(needs_patch(each).sum())


@pytest.mark.parametrize("odd", [1e30, float("nan"), float("inf"), 2.0**16, 1e-30])
def test_an_outlier_is_one_patch_whatever_it_is_beside(odd: float) -> None:
    values = torch.full((64, 520), 0.01, dtype=torch.bfloat16)
    values[::2, 300] = odd
    parts = pack(values)
    assert int(parts[Component.PATCH_BLOCKS][-1, 1]) == 32
    assert torch.equal(
        expand(PACKED, parts, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )


def test_a_block_of_outliers_alone_is_all_patches() -> None:
    values = torch.ones(64, 520, dtype=torch.bfloat16)
    values[5, 128:256] = values[5, 388:516] = 1e30
    parts = pack(values, reserve=1000)
    assert int(parts[Component.PATCH_BLOCKS][-1, 1]) == 256
    assert parts[Component.BASE].view(3, 64)[:, 5].tolist() == [112, 0, 112]
    assert torch.equal(expand(PACKED, parts, torch.bfloat16), values)


def test_parts_are_as_they_are_described() -> None:
    values = torch.ones(128, 16, dtype=torch.bfloat16)
    values[64, 1], values[65, 9], values[66, 15] = -1.5, 0.25, 2.0**-20
    values[65, 1], values[65, 10] = -0.0, 0.0
    parts = pack(values)
    # a half of 8 weights is one block: the first four are its even bytes
    assert parts[Component.WEIGHT][64, :3].tolist() == [0, 0, 0xC0]
    assert parts[Component.WEIGHT][65].tolist() == [0, 0, 0x80, *[0] * 13]
    ones = [0xFF] * 8
    assert parts[Component.EXPONENT][65].tolist() == [0xFF, 0xFF, 0xD0, 0xFF, 0x0F, *ones[5:]]
    assert parts[Component.EXPONENT][66].tolist() == [*ones[1:], 0x0F]
    assert parts[Component.BASE].tolist() == [[127 - 15] * 64] * 2
    assert parts[Component.PATCHES].shape == (64, 2)
    assert parts[Component.PATCHES][0].tolist() == [66 * 16 + 15, (127 - 20) << 7]
    assert parts[Component.PATCH_BLOCKS].tolist() == [[0, 0], [0, 1]]


def test_bytes_of_a_block_take_turns() -> None:
    """Of 272 weights a half is a block of 128 and one of 8."""
    values = (1 + torch.arange(272) % 128 / 128).to(torch.bfloat16).repeat(64, 1)
    first = pack(values)[Component.WEIGHT][0, :136].tolist()
    assert first[:128:2] == list(range(64))
    assert first[1:128:2] == list(range(64, 128))
    assert first[128:] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_fused_matrices_are_those_that_were_packed() -> None:
    """Rows of the second follow those of the first in every part, its patches too."""
    values = [torch.randn(64 * count, 32).to(torch.bfloat16) for count in (1, 2)]
    values[0][3, 4], values[1][100, 5] = 1e-9, -1e-9
    first, second = map(pack, values)
    used, reserve = int(first[Component.PATCH_BLOCKS][-1, 1]), len(first[Component.PATCHES])
    second[Component.PATCHES][:, 0] += values[0].numel()
    second[Component.PATCH_BLOCKS] += reserve
    fused = {part: torch.cat((first[part], second[part])) for part in first}
    fused[Component.PATCHES][used:reserve] = -1  # what is not in use may be anything
    assert torch.equal(expand(PACKED, fused, torch.bfloat16), torch.cat(values))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_rows_are_multiplied_as_if_nothing_was_packed(device: str) -> None:
    module = nn.Linear(256, 192, device=device, dtype=torch.bfloat16)
    plain = nn.Linear(256, 192, device=device, dtype=torch.bfloat16)
    plain.load_state_dict(module.state_dict())
    parts = pack(module.weight.detach())
    hold_stored(module, "weight", PACKED, as_parameters(parts))
    assert isinstance(module, StoredLinear)
    assert set(module.state_dict()) == {"bias", *(component_name("weight", part) for part in parts)}
    x = torch.randn(CODES_ROWS + 1, 256, device=device).to(torch.bfloat16)
    assert torch.equal(module(x), plain(x))
    SharedScratch(nn.ModuleList([module]), torch.bfloat16, torch.device(device))
    assert torch.equal(module(x[: PACKED_ROWS + 1]), plain(x[: PACKED_ROWS + 1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_of_an_embedding_come_bit_for_bit(device: str) -> None:
    values = torch.randn(192, 264, device=device).bfloat16()
    values[70, 3], values[71, 200], values[191] = 1e-38, float("inf"), 0.0
    module = nn.Embedding(192, 264, device=device, dtype=torch.bfloat16)
    hold_stored(module, "weight", PACKED, as_parameters(pack(values)))
    rows = torch.tensor([[70, 0, 71], [191, 70, 128]], device=device)
    assert isinstance(module, StoredEmbedding)
    assert torch.equal(module(rows).view(torch.int16), values[rows].view(torch.int16))
    stand_in: Any = module.weight
    assert (stand_in.dtype, stand_in.device) == (values.dtype, values.device)
    assert torch.equal(stand_in[70, :], values[70])
    for read in (lambda: stand_in[:70], lambda: values == stand_in, lambda: values @ stand_in):
        with pytest.raises(PlanError, match=r"more of it than rows: .*`leave_unpacked=output_head"):
            read()


def test_bases_are_of_128_bytes_of_exponents_of_64_rows() -> None:
    values = torch.full((128, 528), 2.0**-10, dtype=torch.bfloat16)
    values[3, 127], values[70, 264 + 128], values[71, 527] = 1.0, 2.0, 4.0
    base = pack(values)[Component.BASE].view(2, 3, 64)
    values = torch.full((2, 3, 64), 127 - 10 - 15, dtype=torch.uint8)
    values[0, 0, 3], values[1, 1, 6], values[1, 2, 7] = 112, 113, 114
    assert torch.equal(base, values)


def test_packing_in_runs_takes_room_for_the_parts_and_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(4096, 256).mul(0.02).bfloat16()
    values[5, 7], values[4000, 3] = 1e30, float("nan")
    expected = pack(values)
    run_weights = 64 * 256
    monkeypatch.setattr(packing, "RUN_WEIGHTS", run_weights)
    with Held() as held:
        parts = pack_in_runs(values)
    assert all(torch.equal(parts[part], value) for part, value in expected.items())
    assert held.most < sum(value.nbytes for value in parts.values()) + 20 * run_weights
