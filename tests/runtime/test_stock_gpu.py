"""Transformers' own passes on a GPU, with weights that move and with resident ones."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runtime.families import BATCH, PROMPT, PUBLISHED, draw_weights, make_config, require
from tests.runtime.plans import group, offload, run_greedily

pytestmark = pytest.mark.gpu

FAMILIES = ("deepseek_v4", "nemotron_h", "kimi_linear", "granitemoehybrid", "jamba", "falcon")


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_weights_changes_no_bit(family: str, tmp_path: Path) -> None:
    require(family)
    draw_weights(AutoModelForCausalLM.from_config(make_config(family, {}))).save_pretrained(
        tmp_path
    )
    if family in PUBLISHED:
        PUBLISHED[family](tmp_path)
    for prompt in (PROMPT, BATCH):
        resident = run_greedily(tmp_path, offload(), prompt, device="cuda", stock=True)
        for rule in (group(2, 1), group(1, 1, prefill="uva", decode="uva")):
            for slots in (1, 2):
                decision = offload(rule, prefetch_step=slots)
                moved = run_greedily(tmp_path, decision, prompt, device="cuda", stock=True)
                assert all(map(torch.equal, moved, resident))
