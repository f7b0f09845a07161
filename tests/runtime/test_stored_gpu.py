"""Models in their stored form on a GPU: plans against residents, and these against the values."""

from pathlib import Path

import pytest
import torch

from offplan import kernel_sizes
from offplan.capabilities.packing import Packing
from tests.runtime.families import load_stock, run_stock
from tests.runtime.plans import group, offload
from tests.runtime.quantise import ALONE, FORMS, save_stored
from tests.runtime.resident import BATCH, PROMPT, check_against_resident, run_resident

pytestmark = pytest.mark.gpu

CASES = [("qwen3", form) for form in FORMS | ALONE]
CASES += [("qwen3_moe", "fp8_block"), ("qwen3_moe", "int4_zeros"), ("qwen3_moe", "fp8_tensor")]
CASES += [("qwen3_moe", form) for form in ("int8_zeros", "int8_bytes", "gptq", "awq", "nvfp4")]
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
    check(stored, plain)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("qwen3", False), ("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", False)],
)
def test_packed_logits_equal_resident_and_are_near_the_values(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    changes = {"num_experts_per_tok": 4, "tie_word_embeddings": is_tied}
    _, plain = save_stored(family, "fp8_block", tmp_path, torch.bfloat16, **changes)
    check(plain, plain, Packing(group_size=1, num_in_group=1, output_head=True))


@pytest.mark.parametrize(
    ("family", "form"),
    [*(("qwen3_moe", form) for form in ("fp8_block", "gptq", "nvfp4")), ("gpt_oss", "mxfp4")],
)
def test_grouped_logits_equal_resident_and_are_near_the_values(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of either plan multiply values of experts, few at a time."""
    rows = dict.fromkeys(kernel_sizes.GROUPED_ROWS, 1)
    sizes = {"GROUPED_ROWS": rows, "EXPERT_SCRATCH_BYTES": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(kernel_sizes, name, value)
    stored, plain = save_stored(family, form, tmp_path, torch.bfloat16, num_experts_per_tok=4)
    check(stored, plain)


def check(folder: Path, plain: Path, packing: Packing | None = None) -> None:
    """Equal wherever the weights lie, and as near to stock float32 as bfloat16's values are."""
    for chunk in (64, 4):
        for rules in RULES.values():
            decision = offload(*rules, prefill_chunk=chunk).model_copy(update={"packing": packing})
            check_against_resident(folder, decision, capture=True)
    got, weights = run_resident(folder, 64, True, packing)
    expected, all_weights = run_resident(plain, 64, True)
    assert weights < (0.9 if packing else 0.8) * all_weights
    stock = load_stock(plain)
    # the same tokens may be followed until rounding parts them: the prompts' own logits
    for at, prompt in ((0, PROMPT), (len(got) // 2, BATCH)):
        exact = run_stock(stock, prompt)[0]
        error, allowed = ((each[at] - exact).abs().mean() for each in (got, expected))
        # as in bfloat16's comparisons of families
        assert error <= 1.5 * allowed
