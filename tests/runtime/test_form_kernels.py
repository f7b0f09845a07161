"""The kernels of stored forms against plain torch."""

import sys
from itertools import product
from typing import Any

import pytest
import torch

from offplan.forms.form import Component, Form, Kind, WordOrder
from offplan.kernel_sizes import MAX_PAIRS
from offplan.runtime.forms import reference
from tests.runtime.columns import expand, hold
from tests.runtime.interpreted import (
    INTERPRETED,
    TARGETS,
    compile_ptx,
    need_triton,
    run_interpreted,
    runs_itself,
    runs_kernels,
)
from tests.tiers import each_value_once, others_in_sweep

# the interpreter rounds bfloat16 in a way of its own
DEVICE, DTYPES = ("cpu", [torch.float16]) if INTERPRETED else ("cuda", [torch.bfloat16, torch.half])
NUM_OUT, NUM_IN = (128, 256) if INTERPRETED else (320, 768)
LENGTHS = [NUM_IN, NUM_IN - 24]
"""Weights of a packed row: the halves of the second have a block of less at their end."""
EXPERTS = 2 if INTERPRETED else 5
ROWS = [1, 3] if INTERPRETED else [1, 2, 3, 16, 50, 128]
TOKENS = [1, 7] if INTERPRETED else [1, 7, 300, 900]


PACKED = Form(Kind.PACKED)
FORMS = {
    "fp8": Form(Kind.FP8_BLOCK, (128, 128)),
    "fp8 channel": Form(Kind.FP8_CHANNEL),
    "fp8 by powers": Form(Kind.FP8_BLOCK, (128, 128)),
    "mxfp8 by powers": Form(Kind.FP8_BLOCK, (1, 32)),
    "mxfp4": Form(Kind.MXFP4, (1, 32)),
    "nvfp4": Form(Kind.NVFP4, (1, 16)),
    "nvfp4 divided": Form(Kind.NVFP4, (1, 16)),
    "int4": Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    "int4 of 32": Form(Kind.W4A16, (1, 32), WordOrder.COMPRESSED_TENSORS),
    "int4 about 8": Form(Kind.W4A16, (1, 128), WordOrder.COMPRESSED_TENSORS),
    "int8": Form(Kind.W8A16, (1, 64), WordOrder.COMPRESSED_TENSORS),
    "int8 about 128": Form(Kind.W8A16, (1, NUM_IN), WordOrder.COMPRESSED_TENSORS),
    "bytes": Form(Kind.W8A16, (1, NUM_IN), WordOrder.NONE),
    "bytes with zeros": Form(Kind.W8A16, (1, 32), WordOrder.NONE),
    "gptq": Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    "gptq of 8 bits": Form(Kind.W8A16, (1, 32), WordOrder.GPTQ),
    "gptq v2": Form(Kind.W4A16, (1, 64), WordOrder.GPTQ_V2),
    "gptq in order": Form(Kind.W4A16, (1, 128), WordOrder.GPTQ),
    "gptq of small groups in order": Form(Kind.W4A16, (1, 32), WordOrder.GPTQ),
    "gptq of 256 in order": Form(Kind.W4A16, (1, 256), WordOrder.GPTQ),
    "awq": Form(Kind.W4A16, (1, 128), WordOrder.AWQ),
    "bnb8": Form(Kind.BNB8),
    "nf4": Form(Kind.NF4),
    "nf4 nested": Form(Kind.NF4),
    "packed": PACKED,
}
FEW = [
    *(
        "fp8",
        "fp8 channel",
        "mxfp8 by powers",
        "mxfp4",
        "nvfp4",
        "int4",
        "int8",
        "bytes with zeros",
    ),
    *("gptq", "gptq in order", "awq", "nf4 nested", "packed"),
]
"""One for each way through a kernel: all forms are expanded and multiplied by a matrix's rows."""
by_form = pytest.mark.parametrize("name", others_in_sweep(FORMS, FEW))


def few_out(name: str) -> int:
    """Count outputs where a kernel takes eight at most at a time, or products need no tile's edge.

    Packed weights are in whole blocks of 64.
    """
    return NUM_OUT if not INTERPRETED else 64 if FORMS[name] is PACKED else 16


FP4_AND_INT4 = (Kind.MXFP4, Kind.NVFP4, Kind.W4A16)


@pytest.fixture(autouse=INTERPRETED)
def limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.forms import products

    monkeypatch.setattr(products, "gpu_limits", lambda index: (99 << 10, 128))


@pytest.mark.slow
@runs_itself
@pytest.mark.parametrize("tier", ["not sweep", pytest.param("sweep", marks=pytest.mark.sweep)])
def test_on_the_cpu(tier: str) -> None:
    assert "passed" in run_interpreted(__file__, tier=tier)


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=DEVICE)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def make_parts(name: str, *lead: int) -> dict[Component, torch.Tensor]:
    """Random codes, every one of them, with scales: of one weight, or of so many experts."""
    form = FORMS[name]
    groups = -(-NUM_IN // form.block[1]) if form.block else 1
    if form.is_by_columns:
        return _make_columns(form, lead, groups, "order" not in name)
    if form.kind in (Kind.W4A16, Kind.W8A16):
        per, scale = (8 if form.kind is Kind.W4A16 else 4), random(*lead, NUM_OUT, groups)
        if form.word_order is WordOrder.NONE:
            codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.int8)
            zeros = random_bytes(*lead, NUM_OUT, groups).view(torch.int8)
            has_zeros = "zeros" in name
        else:
            codes = random_words(*lead, NUM_OUT, NUM_IN // per)
            zeros = random_words(*lead, NUM_OUT // per, groups)
            has_zeros = "about" not in name
        parts = {Component.WEIGHT: codes, Component.SCALE: scale.to(DTYPES[0])}
        return parts | ({Component.ZERO: zeros} if has_zeros else {})
    if form.kind is Kind.MXFP4:
        shape = (*lead, NUM_OUT, groups)
        scales = torch.randint(0, 250, shape, dtype=torch.uint8, device=DEVICE)
        return {Component.WEIGHT: random_bytes(*shape, 16), Component.SCALE: scales}
    if form.kind is Kind.NVFP4:
        part = Component.GLOBAL_DIVISOR if "divided" in name else Component.GLOBAL_SCALE
        return {
            Component.WEIGHT: random_bytes(*lead, NUM_OUT, NUM_IN // 2),
            Component.SCALE: random(*lead, NUM_OUT, groups).to(torch.float8_e4m3fn),
            part: random(*lead, 2, 1).abs() + 0.1,  # of two that were joined
        }
    if form.kind is Kind.BNB8:
        codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.int8)
        return {Component.WEIGHT: codes, Component.SCALE: random(*lead, NUM_OUT, 1)}
    if form.kind is Kind.NF4:
        return _make_nf4(is_nested="nested" in name)
    if form is PACKED:
        values = random(*lead, NUM_OUT, NUM_IN) * random(*lead, NUM_OUT, 1)
        return pack_each(values.to(torch.bfloat16))
    high, wide = form.block or (1, NUM_IN)
    shape = (*lead, -(-NUM_OUT // high), NUM_IN // wide)
    scale = random(*shape)
    if "powers" in name:
        scale = torch.randint(0, 250, shape, dtype=torch.uint8, device=DEVICE)
        scale = scale if high == 1 else scale.view(torch.float8_e8m0fnu)
    codes = random_bytes(*lead, NUM_OUT, NUM_IN).view(torch.float8_e4m3fn)
    return {Component.WEIGHT: codes, Component.SCALE: scale}


def pack_each(values: torch.Tensor) -> dict[Component, torch.Tensor]:
    """Pack a weight, or those of experts, whatever their bits are."""
    from offplan.runtime.forms.packing import pack

    if values.ndim == 2:
        return pack(values)
    each = [pack(value) for value in values]
    return {part: torch.stack([parts[part] for parts in each]) for part in each[0]}


def _make_columns(
    form: Form, lead: tuple[int, ...], groups: int, has_index: bool
) -> dict[Component, torch.Tensor]:
    per = 8 if form.kind is Kind.W4A16 else 4
    is_awq = form.word_order is WordOrder.AWQ
    shape = (NUM_IN, NUM_OUT // per) if is_awq else (NUM_IN // per, NUM_OUT)
    parts = {
        Component.WEIGHT: random_words(*lead, *shape),
        Component.SCALE: random(*lead, groups, NUM_OUT).to(torch.float16),
        Component.ZERO: random_words(*lead, groups, NUM_OUT // per),
    }
    if not is_awq and has_index:
        # of one matrix, or of two that were joined
        places = torch.rand(*lead, 2 if lead else 1, NUM_IN).argsort(-1)
        _, size = form.block or (1, NUM_IN)
        parts[Component.GROUP_INDEX] = (places // size).to(DEVICE, torch.int32)
    return parts


def _make_nf4(*, is_nested: bool) -> dict[Component, torch.Tensor]:
    blocks = NUM_OUT, NUM_IN // 64
    parts = {
        Component.WEIGHT: random_bytes(NUM_OUT, NUM_IN // 2),
        Component.SCALE: random_bytes(*blocks) if is_nested else random(*blocks),
        Component.CODES: random(16),
    }
    if is_nested:
        nested = random(-(-blocks[0] * blocks[1] // 256))
        parts |= {Component.NESTED_SCALE: nested, Component.NESTED_CODES: random(256)}
        parts[Component.NESTED_OFFSET] = random(1)
    return parts


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("name", "experts", "dtype"), each_value_once(product(FORMS, [0, EXPERTS], DTYPES))
)
def test_expansion_is_exact(
    name: str, experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.forms.products import expand_on_gpu

    monkeypatch.setattr(sys.modules[__name__], "NUM_OUT", few_out(name))
    if experts and FORMS[name].kind is Kind.NF4:
        pytest.skip("experts are not stored so")
    parts = make_parts(name, *([experts] if experts else []))
    expected = expand(FORMS[name], parts, dtype)
    form, parts = hold(FORMS[name], parts)
    assert torch.equal(reference.expand(form, parts, dtype).nan_to_num(), expected.nan_to_num())
    scratch = torch.empty(expected.numel() + 64, dtype=dtype, device=DEVICE)
    for room in (None, scratch):
        got = expand_on_gpu(form, parts, dtype, room)
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert torch.equal(got.isnan(), expected.isnan())
    if dtype is torch.bfloat16 or FORMS[name] is not PACKED:  # whose values are bfloat16
        assert got.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("name", "experts"),
    each_value_once(product(FORMS, [0, EXPERTS]), of=[*product(FEW, [0, EXPERTS])]),
)
def test_operators_tell_what_they_return(
    name: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile goes by their shapes and strides alone."""
    from offplan.runtime.forms import operators

    monkeypatch.setattr(sys.modules[__name__], "NUM_OUT", few_out(name))
    form = FORMS[name]
    if experts and form.kind is Kind.NF4:
        pytest.skip("experts are not stored so")
    form, parts = hold(form, tame(make_parts(name, *([experts] if experts else [])), form))
    x, pairs = random(1, NUM_IN).to(DTYPES[0]), []
    if experts:
        from offplan.runtime.forms.gather import sort_pairs

        pairs = list(sort_pairs(torch.tensor([1], device=DEVICE), experts)[1:])
    checks = "test_faketensor"  # schemas are not checked of FP8
    weight = operators._split(form, parts)
    torch.library.opcheck(operators._expand, (*weight, DTYPES[0]), test_utils=checks)
    torch.library.opcheck(operators._multiply, (*weight, [x, *pairs], False), test_utils=checks)
    if not experts:
        scratch = torch.empty(NUM_OUT * NUM_IN, dtype=x.dtype, device=DEVICE)
        bias = torch.zeros(NUM_OUT, dtype=x.dtype, device=DEVICE)
        for room in (None, scratch):
            torch.library.opcheck(operators._linear, (*weight, x, bias, room), test_utils=checks)
        if form.kind is Kind.PACKED:
            for rows in (1, 100):
                inputs = x.expand(rows, -1), bias
                torch.library.opcheck(
                    operators._linear_of_any, (*weight, *inputs), test_utils=checks
                )


def skip_products(form: Form, of_weight: int) -> None:
    """Skip products in bfloat16 of so many inputs with each weight."""
    from offplan.runtime.forms.products import EACH_ROWS

    if of_weight > EACH_ROWS and INTERPRETED and form.kind in FP4_AND_INT4:
        pytest.skip("the interpreter computes nothing in bfloat16")


def tame(parts: dict[Component, torch.Tensor], form: Form) -> dict[Component, torch.Tensor]:
    """The same with weights of ordinary size and without NaN."""
    if form.kind is Kind.MXFP4:
        return parts | {Component.SCALE: parts[Component.SCALE] % 3 + 126}
    if parts[Component.WEIGHT].dtype is torch.float8_e4m3fn:
        codes, scale = parts[Component.WEIGHT].view(torch.uint8) & 0xBF, parts[Component.SCALE]
        if reference.has_powers(form, scale):
            scale = (scale.view(torch.uint8) % 3 + 126).view(scale.dtype)
        return parts | {Component.WEIGHT: codes.view(torch.float8_e4m3fn), Component.SCALE: scale}
    if form.kind in (Kind.W8A16, Kind.BNB8):
        return parts | {Component.SCALE: parts[Component.SCALE] / 64}
    return parts


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("name", "rows"), each_value_once(product(FORMS, ROWS)))
def test_products_of_codes(name: str, rows: int) -> None:
    from offplan.runtime.forms.products import multiply_rows

    skip_products(FORMS[name], rows)
    parts = tame(make_parts(name), FORMS[name])
    x = random(rows, NUM_IN).to(DTYPES[0])
    expected = x.double() @ expand(FORMS[name], parts, torch.float32).double().T
    got = multiply_rows(*hold(FORMS[name], parts), x)
    assert (got - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("splits", [2, 3, 4])
def test_parts_of_products_are_added_in_their_order(splits: int) -> None:
    from offplan.runtime.forms.kernels import add_splits

    parts = random(splits, 700).float()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    made = torch.empty(700, dtype=DTYPES[0], device=DEVICE)
    add_splits[(6,)](made, parts, 700, SPLITS=splits, BLOCK=128)
    assert torch.equal(made, expected.to(DTYPES[0]))


@pytest.mark.gpu
@runs_kernels
@by_form
def test_last_blocks_reach_past_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 72 outputs and 384 inputs: a product takes 64 and 256 where words hold eight codes.

    GPTQ's last group may be of fewer inputs, here of 128 in place of 256.

    Packed weights are in whole blocks of 64 outputs.
    """
    from offplan.runtime.forms.products import expand_on_gpu, multiply_rows

    form = FORMS[name]
    if form.block == (1, NUM_IN):
        form = form._replace(block=(1, 384))
    for size, value in {"NUM_OUT": 192 if form is PACKED else 72, "NUM_IN": 384}.items():
        monkeypatch.setattr(sys.modules[__name__], size, value)
    monkeypatch.setitem(FORMS, name, form)
    parts = tame(make_parts(name), form)
    values = expand(form, parts, torch.float32)
    form, parts = hold(form, parts)
    assert torch.equal(expand_on_gpu(form, parts, DTYPES[0]), values.to(DTYPES[0]))
    skip_products(form, 5)
    x = random(5, NUM_IN).to(DTYPES[0])
    expected = x.double() @ values.double().T
    assert (multiply_rows(form, parts, x) - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("name", "tokens"), each_value_once(product(FORMS, TOKENS), of=[*product(FEW, TOKENS)])
)
def test_products_of_experts(name: str, tokens: int) -> None:
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.forms.products import multiply_pairs

    form = FORMS[name]
    if form.kind is Kind.NF4:
        pytest.skip("experts are not stored so")
    skip_products(form, 2 * tokens // EXPERTS)
    parts = tame(make_parts(name, EXPERTS), form)
    x = random(tokens, NUM_IN).to(DTYPES[0])
    chosen = torch.randint(0, EXPERTS, (tokens, 2), device=DEVICE)
    weights = expand(form, parts, torch.float32).double()
    form, parts = hold(form, parts)
    by_expert = torch.einsum("ti,eoi->teo", x.double(), weights)
    expected = by_expert.gather(1, chosen[..., None].expand(-1, -1, by_expert.shape[-1]))
    sorted_pairs = sort_pairs(chosen.reshape(-1), EXPERTS)[1:]
    for in_place in (False, True):
        got = multiply_pairs(form, parts, x, *sorted_pairs, in_place=in_place)
        assert (got.view(tokens, 2, -1) - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("tokens", [*TOKENS, 20])
def test_pairs_of_other_ranks_experts_are_left_out(tokens: int) -> None:
    """Their experts are numbered behind the last one, and nothing is read or written for them."""
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.forms.products import multiply_pairs

    parts = tame(make_parts("packed", EXPERTS), PACKED)
    x = random(tokens, NUM_IN).to(DTYPES[0])
    chosen = torch.randint(0, EXPERTS + 1, (2 * tokens,), device=DEVICE)
    chosen[0] = EXPERTS
    own = chosen < EXPERTS
    weights = expand(PACKED, parts, torch.float32).double()
    rows = x.double().repeat_interleave(2, 0)
    expected = torch.einsum("pi,poi->po", rows, weights[chosen.clamp(max=EXPERTS - 1)])[own]
    _, order, starts = sort_pairs(chosen, EXPERTS)
    assert starts[-1] == own.sum()
    got = multiply_pairs(PACKED, parts, x, order, starts)
    if len(expected):
        assert (got[own] - expected).abs().max() < 0.01 * expected.abs().max()
    many = torch.randint(0, EXPERTS + 1, (MAX_PAIRS + 1,), device=DEVICE)
    assert sort_pairs(many, EXPERTS)[2][-1] == (many < EXPERTS).sum()


@pytest.mark.gpu
@runs_kernels
@by_form
def test_gathered_experts_are_those_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.forms.gather import gather, sort_pairs
    from offplan.runtime.forms.products import multiply_pairs

    monkeypatch.setattr(sys.modules[__name__], "NUM_OUT", few_out(name))
    form, experts = FORMS[name], 9
    if form.kind is Kind.NF4:
        pytest.skip("experts are not stored so")
    form, parts = hold(form, tame(make_parts(name, experts), form))
    chosen = torch.tensor([3, 8, 0, 3, 5, 8], device=DEVICE)
    _, order, starts = sort_pairs(chosen, experts)
    gathered, begins = gather(parts, chosen, order, starts)
    assert begins.tolist() == [0, 1, 3, 3, 4, 6, 6]
    for part, value in parts.items():
        for pair, expert in {0: 0, 1: 3, 3: 5, 4: 8}.items():
            assert torch.equal(
                gathered[part][pair].view(torch.uint8), value[expert].view(torch.uint8)
            )
    skip_products(form, 0)
    x = random(3, NUM_IN).to(DTYPES[0])
    there = multiply_pairs(form, parts, x, order, starts)
    assert torch.equal(multiply_pairs(form, gathered, x, order, begins), there)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("none", [9, -1, 2**31 - 1])
def test_pairs_without_an_expert_gather_nothing(none: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's routers name such experts for made-up tokens, whose scores may be NaN."""
    from offplan.runtime.forms.gather import gather, sort_pairs
    from offplan.runtime.forms.products import multiply_pairs

    monkeypatch.setattr(sys.modules[__name__], "NUM_OUT", few_out("packed"))
    parts = tame(make_parts("packed", 9), PACKED)
    chosen = torch.tensor([none, 8, 0, 8, none, none], device=DEVICE)
    _, order, starts = sort_pairs(chosen, 9)
    assert starts.tolist() == [0, *[1] * 8, 3]
    order[3:] = 2**30  # what no program has written may be anything
    gathered, begins = gather(parts, chosen, order, starts)
    assert begins.tolist() == [0, 1, 3, 3, 3, 3, 3]
    x = random(3, NUM_IN).to(DTYPES[0])
    there = multiply_pairs(PACKED, parts, x, order, starts)
    assert torch.equal(multiply_pairs(PACKED, gathered, x, order, begins)[1:4], there[1:4])


def values_of_every_size(num_in: int) -> torch.Tensor:
    """Rows of 2 ** -130 to 2 ** 12, with patches; zeros, subnormals and what is not finite."""
    powers = torch.linspace(-130, 12, NUM_OUT, device=DEVICE, dtype=torch.float64)
    values = random(NUM_OUT, num_in).double() * torch.exp2(powers)[:, None]
    values[1] *= 0
    values[:, 4::7] *= 0  # pruned, with both signs
    values[2] = 2.0**-130 * (-1) ** torch.arange(num_in, device=DEVICE)
    values[5, 3], values[70, 200], values[71, 201], values[64] = 1e-38, 0, -0.0, 1.0
    values[64, ::16] = 2.0**-20  # of which a product is, whose other inputs are zero
    values[-1, 5], values[-2, 7], values[-2, 8] = float("nan"), float("inf"), -float("inf")
    return values.to(torch.bfloat16)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("num_in", "experts"), each_value_once(product(LENGTHS, [0, 2])))
def test_packed_values_are_expanded_bit_for_bit(num_in: int, experts: int) -> None:
    from offplan.runtime.forms.products import expand_on_gpu

    values = values_of_every_size(num_in)
    values = torch.stack((values.flip(0), values)) if experts else values
    parts = pack_each(values)
    for got in (expand_on_gpu(PACKED, parts, values.dtype), expand(PACKED, parts, values.dtype)):
        assert torch.equal(got.view(torch.int16), values.view(torch.int16))


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("num_in", others_in_sweep(LENGTHS, LENGTHS[1:]))
def test_rows_of_packed_values_are_gathered_bit_for_bit(num_in: int) -> None:
    """In any order, as often as they are asked for, patches included; what is no row is NaN."""
    from offplan.runtime.forms.products import gather_rows

    values = values_of_every_size(num_in)
    parts = pack_each(values)
    bounds, places = parts[Component.PATCH_BLOCKS], parts[Component.PATCHES][:, 0]
    patched = places[: int(bounds[-1, 1])].long() // num_in
    assert len(patched)
    rows = torch.cat((torch.arange(NUM_OUT, device=DEVICE).flip(0), patched[:9]))
    on_cpu = {part: tensor.cpu() for part, tensor in parts.items()}
    for got in (gather_rows(PACKED, parts, rows), reference.gather_rows(on_cpu, rows.cpu())):
        assert torch.equal(got.cpu().view(torch.int16), values[rows].cpu().view(torch.int16))
    wrong = torch.tensor([3, NUM_OUT, -1], device=DEVICE)
    got = gather_rows(PACKED, parts, wrong.repeat_interleave(2)[::2])
    assert torch.equal(got[0], values[3])
    assert got[1:].isnan().all()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("num_in", "of_experts", "rows"), each_value_once(product(LENGTHS, [False, True], ROWS))
)
def test_products_of_packed_rows_of_every_size(num_in: int, rows: int, of_experts: bool) -> None:
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.forms.products import multiply_pairs, multiply_rows

    # no float16 is as large or as small as these
    x = torch.zeros(rows, num_in, device=DEVICE, dtype=torch.float if INTERPRETED else DTYPES[0])
    x[:, ::16] = random(rows, -(-num_in // 16)).to(x.dtype)
    if of_experts:
        values = torch.stack([values_of_every_size(num_in) for _ in range(2)])
        chosen = (torch.arange(rows, device=DEVICE) + 1) % 2
        got = multiply_pairs(PACKED, pack_each(values), x, *sort_pairs(chosen, 2)[1:])
        values = values[chosen].double()
    else:
        values = values_of_every_size(num_in)
        got = multiply_rows(PACKED, pack_each(values), x)
        values = values.double().expand(rows, -1, -1)
    products = x.double()[:, None] * values
    errors, sizes = (got - products.sum(-1)).abs(), products.abs().sum(-1)
    assert not got[:, -2:].isfinite().any()
    assert not got[:, 1].any()
    # sums that are subnormal may be lost
    assert (errors <= 0.01 * sizes + 2.0**-120)[:, :-2].all()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_expand_packed_rows_compile(target: int) -> None:
    """All of them, or those chosen, for GPUs that are not here."""
    need_triton()
    from offplan.runtime.forms import packed_kernels

    kernel: Any = packed_kernels.expand
    bytes_of = dict.fromkeys(("weight", "base"), "*u8") | {"rows": "*i64"}
    words_of = dict.fromkeys(("out", "weight", "exponent", "patches", "patch_blocks"), "*i32")
    for chosen in ({"rows": None, "BLOCK_N": 4}, {"BLOCK_N": 1}):
        constants: dict[Any, Any] = {**chosen, "BLOCK_K": 256, "WHOLE": False}
        assert "entry" in compile_ptx(kernel, target, bytes_of | words_of, constants)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_powers_compile(target: int) -> None:
    """For GPUs that are not here."""
    need_triton()
    from offplan.runtime.forms import kernels
    from offplan.runtime.forms.operands import Layout, Weight

    def compile_for(kernel: Any, constants: dict[Any, Any]) -> str:
        weight: Any = Weight(*types)
        kinds = {"x": "*bf16", "out": "*bf16", "weight": weight}
        kinds |= {"order": "*i32", "starts": "*i32"}
        at = kernel.arg_names.index("weight")
        constants = constants | {(at, place): None for place in (2, 3, 4)}
        return compile_ptx(kernel, target, kinds, constants)

    # there are no zeros, scales of scales or tables
    types: Any = ("*u8", "*u8", *["constexpr"] * 3, "i32", "i32")
    code = "fp8" if target >= 89 else "fp8 in software"
    for form in (FORMS["mxfp8 by powers"], FORMS["fp8 by powers"]):
        assert form.block is not None
        layout = {"FORM": Layout(code, 1, "exponent", "", 1, "", *form.block)}
        tile = {"EXPERTS": 8, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": form.block[1]}
        assert "mma" in compile_for(kernels.multiply, layout | tile)
        tile = {"BLOCK_N": 8, "GROUPS": 16, "CHUNK": 16}
        assert "entry" in compile_for(kernels.expand, layout | tile)
