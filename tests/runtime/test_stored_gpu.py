"""Weights in their stored form on a GPU: kernels against plain torch, plans against residents."""

from pathlib import Path

import pytest
import torch

from offplan.forms.form import Form, Kind, Packing, Part
from tests.runtime.plans import group, offload
from tests.runtime.quantise import save_stored
from tests.runtime.resident import check_against_resident, run_resident

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CASES = [
    ("qwen3", form) for form in ("fp8_block", "fp8_channel", "fp8_tensor", "int4", "int4_zeros")
]
CASES += [("qwen3_moe", "fp8_block"), ("qwen3_moe", "int4_zeros"), ("qwen3_moe", "fp8_tensor")]
CASES += [("deepseek_v3", "fp8_block"), ("gpt_oss", "mxfp4")]
RULES = {
    "prefetch": (group(2, 1),),
    "in place": (group(2, 1, "mlp", prefill="uva", decode="uva"),),
    "prefetch, then in place": (group(2, 1, "mlp", decode="uva"),),
}


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_equal_resident_and_are_near_the_values(
    family: str, form: str, tmp_path: Path
) -> None:
    # all experts are chosen: rounding another way sends no token elsewhere
    stored, plain = save_stored(family, form, tmp_path, torch.bfloat16, num_experts_per_tok=4)
    for chunk in (64, 4):
        for rules in RULES.values():
            check_against_resident(stored, offload(*rules, prefill_chunk=chunk), capture=True)
    got, weights = run_resident(stored, 64, True)
    expected, all_weights = run_resident(plain, 64, True)
    assert weights < 0.8 * all_weights
    scale = expected[0].abs().max()
    # the same tokens may be followed until rounding parts them: the prompts' own logits
    for at in (0, len(got) // 2):
        assert (got[at] - expected[at]).abs().max() < 0.05 * scale


def make_parts(form: Form, experts: int, num_out: int, num_in: int) -> dict[Part, torch.Tensor]:
    """Random codes, every one of them, with scales."""
    lead = (experts,) if experts else ()
    if form.kind is Kind.MXFP4:
        shape = (*lead, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0, 250, shape, dtype=torch.uint8, device="cuda")
        return {Part.WEIGHT: blocks, Part.SCALE: scales}
    if form.kind is Kind.W4A16:

        def words(*shape: int) -> torch.Tensor:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")

        groups = num_in // form.block[1] if form.block else 1
        scale = torch.randn(*lead, num_out, groups, device="cuda").to(torch.bfloat16)
        parts = {Part.WEIGHT: words(*lead, num_out, num_in // 8), Part.SCALE: scale}
        return parts | {Part.ZERO: words(*lead, num_out // 8, groups)}
    codes = torch.randint(0, 256, (*lead, num_out, num_in), dtype=torch.uint8, device="cuda")
    rows, columns = -(-num_out // 128), -(-num_in // 128)
    scale = torch.randn(*lead, rows, columns, device="cuda")
    return {Part.WEIGHT: codes.view(torch.float8_e4m3fn), Part.SCALE: scale}


FORMS = [
    Form(Kind.FP8_BLOCK, (128, 128)),
    Form(Kind.MXFP4, (1, 32)),
    Form(Kind.W4A16, (1, 128), Packing.COMPRESSED_TENSORS),
    Form(Kind.W4A16, (1, 32), Packing.COMPRESSED_TENSORS),
]


@pytest.mark.parametrize("experts", [0, 5])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind.value}-{form.block[1]}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expansion_is_exact(form: Form, experts: int, dtype: torch.dtype) -> None:
    from offplan.runtime.forms.products import expand_on_gpu
    from offplan.runtime.forms.reference import expand

    parts = make_parts(form, experts, 320, 768)
    got, expected = expand_on_gpu(form, parts, dtype), expand(form, parts, dtype)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(got.isnan(), expected.isnan())


def tame(parts: dict[Part, torch.Tensor], form: Form) -> dict[Part, torch.Tensor]:
    """The same with weights of ordinary size and without NaN."""
    if form.kind is Kind.MXFP4:
        return parts | {Part.SCALE: parts[Part.SCALE] % 3 + 126}
    if form.kind is Kind.FP8_BLOCK:
        codes = parts[Part.WEIGHT].view(torch.uint8) & 0xBF
        return parts | {Part.WEIGHT: codes.view(torch.float8_e4m3fn)}
    return parts


@pytest.mark.parametrize("rows", [1, 3, 16, 50, 128])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind.value}-{form.block[1]}")
def test_products_of_codes(form: Form, rows: int) -> None:
    from offplan.runtime.forms.products import multiply_rows
    from offplan.runtime.forms.reference import expand

    parts = tame(make_parts(form, 0, 320, 768), form)
    x = torch.randn(rows, 768, device="cuda").to(torch.bfloat16)
    expected = x.double() @ expand(form, parts, torch.float32).double().T
    got = multiply_rows(form, parts, x)
    assert (got - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 7, 300, 900])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind.value}-{form.block[1]}")
def test_products_of_experts(form: Form, tokens: int) -> None:
    from offplan.runtime.forms.experts import _sort
    from offplan.runtime.forms.products import multiply_pairs
    from offplan.runtime.forms.reference import expand

    experts = 5
    parts = tame(make_parts(form, experts, 320, 768), form)
    x = torch.randn(tokens, 768, device="cuda").to(torch.bfloat16)
    chosen = torch.randint(0, experts, (tokens, 2), device="cuda")
    weights = expand(form, parts, torch.float32).double()
    by_expert = torch.einsum("ti,eoi->teo", x.double(), weights)
    expected = by_expert.gather(1, chosen[..., None].expand(-1, -1, by_expert.shape[-1]))
    got = multiply_pairs(form, parts, x, *_sort(chosen.reshape(-1), experts))
    assert (got.view(tokens, 2, -1) - expected).abs().max() < 0.01 * expected.abs().max()
