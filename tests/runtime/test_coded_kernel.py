"""The kernels of a cache's codes: values as torch makes them, and attention to what they are."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.row_cache import SCALE_BYTES
from offplan.runtime.model.cache_codes import BITS, decode_to, encode, scales_of
from offplan.runtime.model.codes_scratch import Scratch
from tests.runtime.interpreted import (
    HAS_GPU,
    INTERPRETED,
    TARGETS,
    compile_kernel,
    compile_ptx,
    need_triton,
    runs_kernels,
    spilled_bytes,
)
from tests.runtime.seen import find_seen
from tests.tiers import each_value_once

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
"""Triton's interpreter multiplies no bfloat16."""
LIMITS = (101376, 8)
KEPT = 100
SEES = ["all", "window", "chunk", "ring", "ring_of_chunk"]
"""As ``coded_kernel.SEES``, which needs Triton."""
REACH = 24
CASES = each_value_once(
    product(SEES, [(4, 2, 16, 16), (71, 1, 64, 64), (8, 8, 24, 40)], [False, True], [None, 5.0])
)
"""What is seen; heads, KV heads and widths; sinks; a soft cap."""


def values_of(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scratch = Scratch(4 * kept.numel() * dtype.itemsize, kept.device)
    given = kept.view(1, -1, *kept.shape[-2:])
    return scratch.expand(given, given, dtype)[0].view(*kept.shape[:-1], -1)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [40, 128])
def test_values_are_those_of_torch_bit_for_bit(dim: int, dtype: torch.dtype) -> None:
    """Of all codes and all scales, of some tokens of a cache."""
    from offplan.runtime.model.codes_kernel import expand_codes

    torch.manual_seed(0)
    kept = torch.randint(256, (2, 3, 100, dim + SCALE_BYTES), dtype=torch.uint8)
    # the interpreter knows no bfloat16 below 2**-126
    least = 7 if INTERPRETED and dtype is torch.bfloat16 else 1
    exponents = torch.randint(least, 251, (2, 3, 100, 1), dtype=torch.int32)
    exponents[:, :, ::7] = 127
    scales_of(kept).copy_((exponents << 23).view(torch.float32))
    scales_of(kept)[0, 0, 5] = torch.nan
    part = kept.to(DEVICE)[:, :, 3:90]
    expected, found = (torch.empty(2, 3, 87, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    decode_to(expected, part[..., :-SCALE_BYTES], scales_of(part))
    moved = BITS[torch.float32]
    expand_codes(part, found, moved.shift, moved.mask, moved.power)
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert int(is_nan.sum()) == dim
    bits = (each.view(whole).masked_fill(is_nan, 0) for each in (found, expected))
    assert torch.equal(*bits)


def make_states(num_new: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """States of three rows and two heads, [3, 2, new, dim]: of all sizes, some of them no numbers.

    As projections give them: the heads of a token lie behind one another.
    """
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    sizes = torch.logspace(-4, 4, 3 * num_new).view(3, num_new, 1, 1)
    states = (torch.randn(3, num_new, 2, dim) * sizes).to(dtype)
    flat = states.view(-1, dim)
    flat[0], flat[1], flat[2], flat[3] = 0.0, -0.0, largest, least
    flat[4, ::3], flat[4, 1::3] = torch.inf, -torch.inf
    flat[5, 2] = torch.nan
    if dtype is not torch.bfloat16:  # of which the interpreter knows no smaller ones
        flat[1, 1:] = least / 4
    return states.transpose(1, 2).to(DEVICE)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(64, 64), (24, 40), (512, 16)])
@pytest.mark.parametrize("step", [True, False])
def test_codes_are_stored_as_torch_makes_them(
    dtype: torch.dtype, sizes: tuple[int, int], step: bool
) -> None:
    """Of a step, each row at a position of its own, in rings; of a chunk of a prompt."""
    from offplan.runtime.model.codes_kernel import store_codes

    torch.manual_seed(0)
    states = [make_states(1 if step else 5, dim, dtype) for dim in sizes]
    rows = slice(1, 4)  # of a cache that has others as well
    found, expected = (
        [torch.full((5, 2, 9, dim + SCALE_BYTES), 7, dtype=torch.uint8) for dim in sizes]
        for _ in range(2)
    )
    positions = torch.tensor([[8], [9], [24]]) if step else torch.arange(3, 8)
    for kept, new in zip(expected, states, strict=True):
        # torch's own rounding is that of the device
        codes = encode(new).cpu()
        if step:
            kept[torch.arange(1, 4), :, positions[:, 0] % 9] = codes[:, :, 0]
        else:
            kept[rows].index_copy_(2, positions, codes)
    found = [each.to(DEVICE) for each in found]
    keys, values = (each[rows] for each in found)
    store_codes(states[0], states[1], keys, values, positions.to(DEVICE))
    for kept, wanted in zip(found, expected, strict=True):
        made, has_nan = kept.cpu(), scales_of(wanted).isnan()
        assert torch.equal(scales_of(made).view(torch.int32), scales_of(wanted).view(torch.int32))
        # codes behind a NaN depend on which of its bits a device chooses, and stand for NaN
        pairs = (each[..., :-SCALE_BYTES].masked_fill(has_nan, 0) for each in (made, wanted))
        assert torch.equal(*pairs)
        assert int(has_nan.sum()) >= 2


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("sees", "sizes", "has_sinks", "soft_cap"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_coded", [True, False])
def test_a_kept_token_weighs_as_its_values(
    is_coded: bool,
    sees: str,
    sizes: tuple[int, int, int, int],
    has_sinks: bool,
    soft_cap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offplan.runtime.model import coded_kernel

    if INTERPRETED:
        monkeypatch.setattr(coded_kernel, "gpu_limits", lambda index: LIMITS)
    torch.manual_seed(0)
    heads, num_kv, key_dim, value_dim = sizes
    kept = REACH if sees.startswith("ring") else KEPT
    positions = [KEPT - 3, 30, 0]
    # sizes of tokens differ by thousands: so do their scales
    spread = torch.logspace(-1.5, 1.5, kept)[torch.randperm(kept), None]
    query = torch.randn(3, heads, key_dim).to(DEVICE, dtype)
    keys, values = (
        (torch.randn(3, num_kv, kept, dim) * spread).to(DEVICE, dtype)
        for dim in (key_dim, value_dim)
    )
    if is_coded:
        keys, values = encode(keys), encode(values)
    sinks = torch.randn(heads).to(DEVICE, dtype) if has_sinks else None
    expected = torch.empty(3, heads, value_dim)
    of_keys, of_values = (
        (values_of(each, dtype) if is_coded else each.clone()).float() for each in (keys, values)
    )
    unread = 0xFF if is_coded else torch.nan  # 0xFF has a scale that is NaN
    for row, position in enumerate(positions):
        seen = [*range(*find_seen(sees, position, REACH))]
        unseen = [place for place in range(kept) if place not in seen]
        keys[row, :, unseen], values[row, :, unseen] = unread, unread
        repeated = heads // num_kv
        key, value = (
            of[row, :, seen].repeat_interleave(repeated, 0) for of in (of_keys, of_values)
        )
        scores = 0.1 * (query[row].float()[:, None] @ key.mT)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1)], -1)
        weights = scores.softmax(-1)[..., : len(seen)]
        expected[row] = (weights @ value)[:, 0].cpu()
    kind = getattr(coded_kernel, sees.upper())
    where = torch.tensor(positions, device=DEVICE)
    got = coded_kernel.attend_one(
        query, keys, values, where, 0.1, soft_cap, sinks, kind, REACH
    ).cpu()
    # weights are rounded to the query's type, each by half a unit at most
    size = float(expected.abs().max())
    bound = 2 * torch.finfo(dtype).eps * size
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=bound)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("sees", ["all", "window", "chunk"])
@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_queries_of_one_text_read_one_cache(
    dtype: torch.dtype, is_coded: bool, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as of a cache for each; of a ring as of the whole text, but for the splits."""
    from offplan.runtime.model import coded_kernel

    if INTERPRETED:
        monkeypatch.setattr(coded_kernel, "gpu_limits", lambda index: LIMITS)
    torch.manual_seed(0)
    num_new, heads, dim = 4, 8, 64
    query = torch.randn(num_new, heads, dim).to(DEVICE, dtype)
    keys, values = (torch.randn(1, 2, KEPT, dim).to(DEVICE, dtype) for _ in range(2))
    if is_coded:
        keys, values = encode(keys), encode(values)
    for first in (0, REACH - 2, 71):
        where = torch.arange(first, first + num_new, device=DEVICE)
        more: Any = (where, 0.1, None, None, getattr(coded_kernel, sees.upper()), REACH)
        copies: Any = (each.repeat(num_new, 1, 1, 1) for each in (keys, values))
        expected = coded_kernel.attend_one(query, *copies, *more)
        assert torch.equal(coded_kernel.attend_one(query, keys, values, *more), expected)
        if sees == "all":
            continue
        size = REACH + num_new - 1
        unread = 0xFF if is_coded else torch.nan  # 0xFF has a scale that is NaN
        rings: Any = [torch.full_like(each[:, :, :size], unread) for each in (keys, values)]
        for ring, kept in zip(rings, (keys, values), strict=True):
            for place in range(max(0, first + num_new - size), first + num_new):
                ring[:, :, place % size] = kept[:, :, place]
        made = coded_kernel.attend_one(query, *rings, *more, modulus=size)
        bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(made, expected, rtol=0, atol=bound)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_queries_of_one_text_read_one_cache_of_latents(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.model import coded_kernel, latent_kernel

    if INTERPRETED:
        for module in (coded_kernel, latent_kernel):
            monkeypatch.setattr(module, "gpu_limits", lambda index: LIMITS)
    torch.manual_seed(0)
    query, query_rotary = (torch.randn(8, 20, dim).to(DEVICE, dtype) for dim in (64, 16))
    latents, rotaries = (torch.randn(1, KEPT, dim).to(DEVICE, dtype) for dim in (64, 16))
    where = torch.arange(60, 68, device=DEVICE)
    kernels: Any = (
        (latent_kernel.attend_filled, (latents, rotaries)),
        (coded_kernel.attend_latent_codes, (encode(latents), encode(rotaries))),
    )
    for attend, one in kernels:
        copies = (each.repeat(8, 1, 1) for each in one)
        expected = attend(query, query_rotary, *copies, where, 0.1)
        assert torch.equal(attend(query, query_rotary, *one, where, 0.1), expected)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("heads", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_of_codes_mix_as_their_values(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.model import coded_kernel

    if INTERPRETED:
        monkeypatch.setattr(coded_kernel, "gpu_limits", lambda index: LIMITS)
    torch.manual_seed(0)
    query, query_rotary = (torch.randn(3, heads, dim).to(DEVICE, dtype) for dim in (64, 16))
    latents, rotaries = (encode(torch.randn(3, KEPT, dim).to(DEVICE, dtype)) for dim in (64, 16))
    of_latents, of_rotaries = (values_of(each, dtype).float() for each in (latents, rotaries))
    where = torch.tensor([KEPT - 1, 30, 0], device=DEVICE)
    scores = query.float() @ of_latents.mT + query_rotary.float() @ of_rotaries.mT
    beyond = torch.arange(KEPT, device=DEVICE) > where[:, None]
    shares = (scores * 0.1).masked_fill(beyond[:, None], -torch.inf).softmax(-1)
    expected = (shares @ of_latents).cpu()
    latents[beyond], rotaries[beyond] = 0xFF, 0xFF
    got = coded_kernel.attend_latent_codes(query, query_rotary, latents, rotaries, where, 0.1)
    bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(got.cpu().float(), expected, rtol=0, atol=bound)


@pytest.mark.skipif(INTERPRETED, reason="asks no kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moved_bits_are_codes_less_a_power_of_two(dtype: torch.dtype) -> None:
    need_triton()
    from offplan.runtime.model.coded_kernel import choose_constants

    codes, chosen = torch.arange(256, dtype=torch.uint8), choose_constants(dtype)
    bits = (codes.view(torch.int8).int() << chosen["SHIFT"]) & chosen["MASK"]
    made = bits.to(torch.uint16).view(dtype).double() * 2.0 ** chosen["POWER"]
    expected = torch.empty(256)
    decode_to(expected, codes, torch.ones(1))
    assert torch.equal(made, expected.double())


FEW_BYTES = 160
"""Bytes of a thread that may not find a register: of codes of 256 in rings with room for drafts.

By 4 warps those had 564, and latents 1,412.
"""
POINTERS = {"query": "*{0}", "query_rotary": "*{0}", "keys": "*u8", "values": "*u8"}
POINTERS |= {"latents": "*u8", "rotaries": "*u8", "position": "*i64", "partial": "*fp32"}
POINTERS |= {"log_sums": "*fp32", "sinks": "*{0}", "out": "*{0}", "kept": "*u8", "made": "*{0}"}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kind", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_kernels_compile_for_every_gpu(target: int, kind: str, name: str, tmp_path: Path) -> None:
    """Threads keep next to nothing in local memory, which is set aside for all at once."""
    need_triton()
    from offplan.runtime.model import coded_kernel, codes_kernel, latent_kernel

    dtype = getattr(torch, name)
    of_type = coded_kernel.choose_constants(dtype)
    shared = {80: 166912, 90: 232448}.get(target, 101376)

    def compile_one(
        kernel: Any, constants: dict[str, Any], num_warps: int = 4, **others: str
    ) -> str:
        pointers = POINTERS | others
        kinds = {
            each: text.format(kind) for each, text in pointers.items() if each in kernel.arg_names
        }
        made = compile_kernel(kernel, target, kinds, constants, {"num_warps": num_warps})
        assert spilled_bytes(made, target, tmp_path) <= FEW_BYTES
        return str(made.asm["ptx"])

    for dim, is_coded in product((64, 128, 256, 512), (True, False)):
        of_type = coded_kernel.choose_constants(dtype) if is_coded else coded_kernel.VALUES
        kept = dict.fromkeys(("keys", "values"), "*u8" if is_coded else "*{0}")
        widths = {"KEY": dim, "VALUE": dim, "BLOCK_K": dim, "BLOCK_V": dim, "IS_CODED": is_coded}
        block = coded_kernel.choose_block(2 * dim, shared, 1 if is_coded else 2)
        more = {"SCALE": 0.1, "SOFT_CAP": 30.0, "REACH": 4096, "SEES": 1, "NUM_KV": 8}
        sizes, warps = {"BLOCK_H": 16, "BLOCK_S": block}, latent_kernel.choose_warps(dim)
        constants = {**widths, **more, **sizes, **of_type}
        for of_pass in ({"MODULUS": 0, "OWN_ROWS": 1}, {"MODULUS": 4103, "OWN_ROWS": 0}):
            attend = coded_kernel._attend_split
            assert "mma" in compile_one(attend, {**constants, **of_pass}, warps, **kept)
    of_type = coded_kernel.choose_constants(dtype)
    more = {"SCALE": 0.1, "LATENT": 512, "ROPE": 64, "BLOCK_H": 16}
    warps = latent_kernel.choose_warps(512)
    for own_rows in (0, 1):
        block = coded_kernel.choose_block(512 + 64, shared)
        constants = {**more, **of_type, "OWN_ROWS": own_rows, "BLOCK_S": block}
        assert "mma" in compile_one(coded_kernel._attend_latent_split, constants, warps)
        values = {"latents": "*{0}", "rotaries": "*{0}"}
        block = latent_kernel.choose_block(512 + 64, shared)
        constants = {**more, "OWN_ROWS": own_rows, "BLOCK_S": block}
        assert "mma" in compile_one(latent_kernel._attend_split, constants, warps, **values)
    sizes = {"HAS_SINKS": True, "VALUE": 96, "BLOCK_V": 128, "BLOCK": 128}
    compile_one(coded_kernel.join_splits, sizes)
    moved = BITS[torch.float32]
    numbers = {"SHIFT": moved.shift, "MASK": moved.mask, "POWER": moved.power}
    compile_one(codes_kernel._expand, {**numbers, "DIM": 96, "BLOCK_D": 128, "BLOCK_T": 32})
    widths = {"KEY": 512, "VALUE": 96, "BLOCK_K": 512, "BLOCK_V": 128, "BLOCK": 2}
    kinds: dict[str, Any] = {
        "keys": f"*{kind}",
        "values": f"*{kind}",
        "kept_keys": "*u8",
        "kept_values": "*u8",
    }
    kinds |= {"positions": "*i64", **dict.fromkeys(("from_keys", "from_values"), ("i32",) * 3)}
    kinds |= dict.fromkeys(("to_keys", "to_values"), ("i32",) * 2)
    compile_ptx(codes_kernel._store, target, kinds, widths, {"num_warps": 4})
