"""Weights are computed with as they are stored, and give what their values would."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runtime.families import run_stock
from tests.runtime.plans import group, offload, run_greedily
from tests.runtime.quantise import FORMS, save_stored

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4]])
BATCH = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
CASES = [("qwen3", form) for form in FORMS]
CASES += [("qwen3_moe", form) for form in FORMS] + [
    ("deepseek_v3", "fp8_block"),
    ("gpt_oss", "mxfp4"),
]
SEGMENTS: list[tuple[str, ...]] = [(), ("self_attn",), ("mlp",)]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_tokens_are_those_of_the_values(family: str, form: str, tmp_path: Path) -> None:
    stored, plain = save_stored(family, form, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for prompt, chunk in ((PROMPT, 64), (PROMPT, 3), (BATCH, 64)):
        expected = run_stock(stock, prompt)
        for segments in SEGMENTS:
            got = run_greedily(stored, offload(group(2, 1, *segments), prefill_chunk=chunk), prompt)
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
