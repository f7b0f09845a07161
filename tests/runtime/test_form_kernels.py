"""The kernels of stored forms against plain torch."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.forms.form import Component, Form, Kind, WordOrder
from offplan.kernel_sizes import IN_PLACE_ROWS, MAX_PAIRS
from offplan.runtime.forms import reference
from tests.runtime import coded
from tests.runtime.coded import (
    DEVICE,
    DTYPES,
    FEW,
    FORMS,
    PACKED,
    few_out,
    make_parts,
    pack_each,
    random,
    tame,
)
from tests.runtime.columns import expand, hold
from tests.runtime.interpreted import (
    INTERPRETED,
    TARGETS,
    compile_kernel,
    compile_ptx,
    need_triton,
    runs_kernels,
    spilled_bytes,
)
from tests.tiers import each_value_once, others_in_sweep

LENGTHS = [coded.NUM_IN, coded.NUM_IN - 24]
"""Weights of a packed row: the halves of the second have a block of less at their end."""
EXPERTS = 2 if INTERPRETED else 5
ROWS = [1, 3] if INTERPRETED else [1, 2, 3, 16, 50, 128]
TOKENS = [1, 7] if INTERPRETED else [1, 7, 300, 900]


by_form = pytest.mark.parametrize("name", others_in_sweep(FORMS, FEW))


FP4_AND_INT4 = (Kind.MXFP4, Kind.NVFP4, Kind.W4A16)


@pytest.fixture(autouse=INTERPRETED)
def limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.forms import products

    monkeypatch.setattr(products, "gpu_limits", lambda index: (99 << 10, 128))


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("name", "experts", "dtype"), each_value_once(product(FORMS, [0, EXPERTS], DTYPES))
)
def test_expansion_is_exact(
    name: str, experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offplan.runtime.forms.products import expand_on_gpu

    monkeypatch.setattr(coded, "NUM_OUT", few_out(name))
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

    monkeypatch.setattr(coded, "NUM_OUT", few_out(name))
    form = FORMS[name]
    if experts and form.kind is Kind.NF4:
        pytest.skip("experts are not stored so")
    form, parts = hold(form, tame(make_parts(name, *([experts] if experts else [])), form))
    x, pairs = random(1, coded.NUM_IN).to(DTYPES[0]), []
    if experts:
        from offplan.runtime.forms.gather import sort_pairs

        pairs = list(sort_pairs(torch.tensor([1], device=DEVICE), experts)[1:])
    checks = "test_faketensor"  # schemas are not checked of FP8
    weight = operators._split(form, parts)
    torch.library.opcheck(torch.ops.offplan.expand.default, (*weight, DTYPES[0]), test_utils=checks)
    torch.library.opcheck(
        torch.ops.offplan.multiply.default, (*weight, [x, *pairs], False), test_utils=checks
    )
    if not experts:
        scratch = torch.empty(coded.NUM_OUT * coded.NUM_IN, dtype=x.dtype, device=DEVICE)
        bias = torch.zeros(coded.NUM_OUT, dtype=x.dtype, device=DEVICE)
        for room in (None, scratch):
            torch.library.opcheck(
                torch.ops.offplan.linear.default, (*weight, x, bias, room), test_utils=checks
            )
        if form.kind is Kind.PACKED:
            for rows in (1, 100):
                inputs = x.expand(rows, -1), bias
                torch.library.opcheck(
                    torch.ops.offplan.linear_of_any.default, (*weight, *inputs), test_utils=checks
                )


def skip_products(form: Form, of_weight: int) -> None:
    """Skip products in bfloat16 of so many inputs with each weight."""
    from offplan.runtime.forms.products import EACH_ROWS

    if of_weight > EACH_ROWS and INTERPRETED and form.kind in FP4_AND_INT4:
        pytest.skip("the interpreter computes nothing in bfloat16")


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("name", "rows"), each_value_once(product(FORMS, ROWS)))
def test_products_of_codes(name: str, rows: int) -> None:
    from offplan.runtime.forms.products import multiply_rows

    skip_products(FORMS[name], rows)
    parts = tame(make_parts(name), FORMS[name])
    x = random(rows, coded.NUM_IN).to(DTYPES[0])
    expected = x.double() @ expand(FORMS[name], parts, torch.float32).double().T
    got = multiply_rows(*hold(FORMS[name], parts), x)
    assert (got - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("num_in", "rows"), [(96, 1), (160, 1), (320, 1), (160, 16), (320, 16)])
def test_rows_may_have_one_scale_whatever_their_length(num_in: int, rows: int) -> None:
    """A tile's words are no multiple of such a row's."""
    from offplan.runtime.forms.products import multiply_rows

    form = Form(Kind.W4A16, (1, num_in), WordOrder.COMPRESSED_TENSORS)
    skip_products(form, rows)
    scale = random(16, 1).to(DTYPES[0])
    parts = {Component.WEIGHT: coded.random_words(16, num_in // 8), Component.SCALE: scale}
    x = random(rows, num_in).to(DTYPES[0])
    expected = x.double() @ expand(form, parts, torch.float32).double().T
    got = multiply_rows(*hold(form, parts), x)
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
@pytest.mark.parametrize(
    ("name", "rows", "num_in"),
    [("fp8", 1, 1280), ("fp8", 3, 256), ("int4 about 8", 1, 256), ("mxfp4", 1, 256)],
)
def test_weights_are_multiplied_together(
    name: str, rows: int, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one launch, bit for bit as by one each; they need not have as many rows."""
    from offplan.runtime.forms import products

    monkeypatch.setattr(coded, "NUM_IN", num_in)
    x, expected, weights = random(rows, num_in).to(DTYPES[0]), [], []
    for num_out in (128, 72, 80):
        monkeypatch.setattr(coded, "NUM_OUT", num_out)
        form, parts = hold(FORMS[name], tame(make_parts(name), FORMS[name]))
        expected.append(products.multiply_rows(form, parts, x).flatten())
        weights.append(parts)
    assert products.are_alike(form, weights, rows, 0)
    assert torch.equal(products.multiply_together(form, weights, x), torch.cat(expected))
    longer = {part: torch.cat([each, each], -1) for part, each in weights[0].items()}
    assert not products.are_alike(form, [weights[0], longer], rows, 0)


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
    if form.block == (1, coded.NUM_IN):
        form = form._replace(block=(1, 384))
    for size, value in {"NUM_OUT": 192 if form is PACKED else 72, "NUM_IN": 384}.items():
        monkeypatch.setattr(coded, size, value)
    monkeypatch.setitem(FORMS, name, form)
    parts = tame(make_parts(name), form)
    values = expand(form, parts, torch.float32)
    form, parts = hold(form, parts)
    assert torch.equal(expand_on_gpu(form, parts, DTYPES[0]), values.to(DTYPES[0]))
    skip_products(form, 5)
    x = random(5, coded.NUM_IN).to(DTYPES[0])
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
    x = random(tokens, coded.NUM_IN).to(DTYPES[0])
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
    x = random(tokens, coded.NUM_IN).to(DTYPES[0])
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

    monkeypatch.setattr(coded, "NUM_OUT", few_out(name))
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
    x = random(3, coded.NUM_IN).to(DTYPES[0])
    there = multiply_pairs(form, parts, x, order, starts)
    assert torch.equal(multiply_pairs(form, gathered, x, order, begins), there)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("name", "num_in"), [("mxfp4", coded.NUM_IN), ("mxfp4", 2880), ("packed", coded.NUM_IN)]
)
def test_an_expert_without_a_slot_crosses_once(
    name: str, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of four sequences read it once for each pair before."""
    from offplan.runtime.forms import kernels, packed_kernels
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.forms.products import multiply_pairs, multiply_slots

    most_pairs = []

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                most_pairs.append(constants["BLOCK_M"])
                self._kernel[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(coded, "NUM_OUT", few_out(name))
    monkeypatch.setattr(coded, "NUM_IN", num_in)
    form, parts = hold(FORMS[name], tame(make_parts(name, 9), FORMS[name]))
    x = random(3, num_in).to(DTYPES[0])
    chosen = torch.tensor([3, 8, 3, 3, 5, 8], device=DEVICE)
    order, starts = sort_pairs(chosen, 9)[1:]
    expected = multiply_pairs(form, parts, x, order, starts)
    for module in (kernels, packed_kernels):
        monkeypatch.setattr(module, "multiply_each", Noting(module.multiply_each))
    slots = {part: value[5:6] for part, value in parts.items()}  # expert 5 has the only one
    of_slots = sort_pairs(torch.where(chosen == 5, 0, 9), 9)[1:]
    rest = sort_pairs(torch.where(chosen == 5, 9, chosen), 9)[1:]
    assert torch.equal(multiply_slots(form, slots, parts, x, *of_slots, *rest), expected)
    in_slots, in_place = most_pairs
    assert in_slots == 1
    assert in_place == IN_PLACE_ROWS


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("none", [9, -1, 2**31 - 1])
def test_pairs_without_an_expert_gather_nothing(none: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's routers name such experts for made-up tokens, whose scores may be NaN."""
    from offplan.runtime.forms.gather import gather, sort_pairs
    from offplan.runtime.forms.products import multiply_pairs

    monkeypatch.setattr(coded, "NUM_OUT", few_out("packed"))
    parts = tame(make_parts("packed", 9), PACKED)
    chosen = torch.tensor([none, 8, 0, 8, none, none], device=DEVICE)
    _, order, starts = sort_pairs(chosen, 9)
    assert starts.tolist() == [0, *[1] * 8, 3]
    order[3:] = 2**30  # what no program has written may be anything
    gathered, begins = gather(parts, chosen, order, starts)
    assert begins.tolist() == [0, 1, 3, 3, 3, 3, 3]
    x = random(3, coded.NUM_IN).to(DTYPES[0])
    there = multiply_pairs(PACKED, parts, x, order, starts)
    assert torch.equal(multiply_pairs(PACKED, gathered, x, order, begins)[1:4], there[1:4])


def values_of_every_size(num_in: int) -> torch.Tensor:
    """Rows of 2 ** -130 to 2 ** 12, with patches; zeros, subnormals and what is not finite."""
    powers = torch.linspace(-130, 12, coded.NUM_OUT, device=DEVICE, dtype=torch.float64)
    values = random(coded.NUM_OUT, num_in).double() * torch.exp2(powers)[:, None]
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
    rows = torch.cat((torch.arange(coded.NUM_OUT, device=DEVICE).flip(0), patched[:9]))
    on_cpu = {part: tensor.cpu() for part, tensor in parts.items()}
    for got in (gather_rows(PACKED, parts, rows), reference.gather_rows(on_cpu, rows.cpu())):
        assert torch.equal(got.cpu().view(torch.int16), values[rows].cpu().view(torch.int16))
    wrong = torch.tensor([3, coded.NUM_OUT, -1], device=DEVICE)
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
        if "more" not in constants:
            kinds |= {"out": "*fp32", "more": ("i32", "i32", "i64", "i64") * 2}
        at = kernel.arg_names.index("weight")
        constants = constants | {(at, place): None for place in (2, 3, 4)}
        return compile_ptx(kernel, target, kinds, constants, aligned=["out"])

    # there are no zeros, scales of scales or tables
    types: Any = ("*u8", "*u8", *["constexpr"] * 3, "i32", "i32")
    code = "fp8" if target >= 89 else "fp8 in software"
    words: Any = ("*i32", "*u8", *["constexpr"] * 3, "i32", "i32")
    types, powers = words, {"FORM": Layout("fp4", 8, "exponent", "", 1, "", 1, 4)}
    assert "st.global.v4" in compile_for(kernels.expand_flat, powers | {"BLOCK": 128})
    types = ("*u8", "*u8", *["constexpr"] * 3, "i32", "i32")
    for form in (FORMS["mxfp8 by powers"], FORMS["fp8 by powers"]):
        assert form.block is not None
        layout = {"FORM": Layout(code, 1, "exponent", "", 1, "", *form.block)}
        tile = {"EXPERTS": 8, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": form.block[1]}
        for beside in ({"more": None}, {}):
            assert "mma" in compile_for(kernels.multiply, layout | tile | beside)
        tile = {"BLOCK_N": 8, "GROUPS": 16, "CHUNK": 16}
        assert "entry" in compile_for(kernels.expand, layout | tile)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_words_compile(target: int) -> None:
    """For GPUs that are not here: by one input each or several, alone or beside other weights."""
    need_triton()
    from offplan.runtime.forms import kernels, packed_kernels
    from offplan.runtime.forms.operands import Layout, Weight

    kinds: dict[str, Any] = {"x": "*bf16", "order": "*i32", "starts": "*i32"}
    further = {"more": ("i32", "i32", "i64", "i64") * 2}
    types: Any = ("*i32", "*u8", *["constexpr"] * 3, "i32", "i32")
    codes = kinds | {"weight": Weight(*types)}
    layout = {"FORM": Layout("fp4", 8, "exponent", "", 1, "", 1, 4)}
    packed = kinds | {"weight": "*i32", "exponent": "*i32", "base": "*u8", "patches": "*i32"}
    packed |= {"patch_blocks": "*i32"}
    for name, rows, words, packed_rows in (("multiply", 64, 64, 64), ("multiply_each", 8, 128, 16)):
        splits = name == "multiply"
        own = {"out": "*fp32" if splits else "*bf16"}
        tile: dict[Any, Any] = {"BLOCK_M": 16, "BLOCK_N": rows, "BLOCK_K": words}
        alone = {} if splits else {"BLOCK_M": 1}
        kernel: Any = getattr(kernels, name)
        at = kernel.arg_names.index("weight")
        none = {(at, place): None for place in (2, 3, 4)}
        of_experts = {"EXPERTS": 32, "more": None}
        of_rows = {"EXPERTS": 0, "order": None, "starts": None}
        compile_ptx(kernel, target, codes | own, tile | layout | none | of_experts)
        compile_ptx(kernel, target, codes | own, tile | layout | none | of_experts | alone)
        compile_ptx(kernel, target, codes | own | further, tile | layout | none | of_rows | alone)
        kernel = getattr(packed_kernels, name)
        whole = {"WHOLE": True, "BLOCK_N": packed_rows, "BLOCK_K": 32, "more": None}
        for experts in (of_experts, of_experts | alone, of_rows | alone):
            compile_ptx(kernel, target, packed | own, tile | whole | experts)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_eights_of_words_keep_to_registers(target: int, tmp_path: Path) -> None:
    """gpt-oss's have 360 words. By loads of a word each threads stored 280 bytes and more."""
    need_triton()
    from offplan.runtime.forms import kernels
    from offplan.runtime.forms.operands import Layout, Weight

    at = kernels.multiply.arg_names.index("weight")
    kinds: dict[str, Any] = {"x": "*bf16", "order": "*i32", "starts": "*i32", "out": "*fp32"}
    aligned: list[str | tuple[int, int]] = [*kinds, "num_out", "split_elements", (at, 0), (at, 1)]
    types: Any = ("*i32", "*u8", *["constexpr"] * 3, "i32", "i32")
    kinds["weight"] = Weight(*types)
    constants: dict[Any, Any] = {(at, place): None for place in (2, 3, 4)} | {"more": None}
    constants |= {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "EXPERTS": 32}
    for eights in (False, True):
        constants["FORM"] = Layout("fp4", 8, "exponent", "", 1, "", 1, 4, eights)
        made = compile_kernel(
            kernels.multiply, target, kinds, constants, {"num_stages": 3}, aligned
        )
        assert (spilled_bytes(made, target, tmp_path) < 64) == eights
