"""Prompts in parts on a GPU: layers compiled by their pieces, against resident ones."""

from pathlib import Path

import pytest
import torch

from offplan import kernel_sizes
from offplan.plan import Offload
from tests.runtime.plans import group, in_parts, offload, open_session
from tests.runtime.quantise import save_routed

pytestmark = pytest.mark.gpu

CASES = [("qwen3_moe", form) for form in ("values", "packed", "fp8_block", "int4_zeros", "nvfp4")]
CASES += [("deepseek_v3", "values"), ("deepseek_v3", "fp8_block"), ("gpt_oss", "mxfp4")]
PROMPTS = [torch.arange(40).view(1, 40) % 64, torch.arange(64).view(4, 16) % 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


def run(folder: Path, decision: Offload) -> list[torch.Tensor]:
    """Logits of prompts, of each again, and of steps after them, of tokens that are given."""
    logits = []
    with open_session(folder, decision, "cuda") as session, session.stream():
        for prompt in PROMPTS:
            for _ in range(2):
                logits.append(session.prefill(prompt).float().cpu())
            for step in range(3):
                tokens = torch.arange(len(prompt), device="cuda").view(-1, 1) + step
                logits.append(session.decode(tokens).float().cpu())
        assert torch._dynamo.config.recompile_limit < 64
    return logits


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_those_of_resident_experts(
    folder: Path, family: str, form: str, chunk: int
) -> None:
    """But for what compilers round where a layer is one piece."""
    # tokens choose all four: what is chosen between near ties follows rounding
    checkpoint, packing = save_routed(folder, family, form, 4)
    attention = group(1, 1, "self_attn", decode="uva")
    resident, *parted = (
        run(
            checkpoint, offload(*rules, prefill_chunk=chunk).model_copy(update={"packing": packing})
        )
        for rules in ([], [in_parts(4), attention], [in_parts(4, tokens_at_once=16), attention])
    )
    for made in parted:
        for got, expected in zip(made, resident, strict=True):
            scale = expected.abs().max()
            assert (got - expected).abs().max() < 0.05 * scale
        # a prompt that comes again gives the same
        assert torch.equal(made[0], made[1])


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3_moe", "values"), ("qwen3_moe", "fp8_block"), ("gpt_oss", "mxfp4")]
)
def test_grouped_logits_are_those_of_resident_experts(
    folder: Path, family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some chunks multiply the values of experts, the last ones of fewer tokens their codes."""
    rows = dict.fromkeys(kernel_sizes.GROUPED_ROWS, 12)
    sizes = {"GROUPED_ROWS": rows, "EXPERT_SCRATCH_BYTES": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(kernel_sizes, name, value)
    test_logits_are_those_of_resident_experts(folder, family, form, 16)
