"""A cache in FP8 on a GPU: steps that are captured, with kernels that read codes in place."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.checkpoint.open import open_model
from offplan.runtime.session import Session
from tests.runtime.coded_cache import FP8, PROMPT
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import CONTEXT, group, offload

pytestmark = pytest.mark.gpu
NAMES = ["qwen3", "sinks", "latents", "mistral_windowed", "chunked", "soft_caps"]
LEAST, MORE = 0.01, 3.0
"""Part of the largest logit by which logits may differ, and times by which they may differ more."""


def follow(folder: Path, device: str, chunk: int) -> torch.Tensor:
    """Logits after a prompt and after tokens that depend on none, [21, batch, vocabulary]."""
    decision = offload(group(2, 1), prefill_chunk=chunk)
    with (
        Session(
            *(open_model(str(folder)), decision),
            context=CONTEXT,
            device=device,
            folder=folder,
            way=FP8,
        ) as session,
        session.stream(),
    ):
        made = [session.prefill(PROMPT).float().cpu()]
        for number in range(20):
            tokens = torch.tensor([[number], [60 - number]]).to(session.device)
            made.append(session.decode(tokens).float().cpu())
    return torch.stack(made)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [64, 5])
def test_logits_are_those_of_the_cpu(tmp_path: Path, name: str, chunk: int) -> None:
    """They differ from float32's by hardly more than those that a CPU makes in float16."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(name, tmp_path / "tiny"))
    model.half().save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "whole")
    expected = follow(tmp_path / "whole", "cpu", chunk)
    near, found = (follow(tmp_path / "half", device, chunk) for device in ("cpu", "cuda"))
    differences = [
        float((each - expected).abs().amax((1, 2)).median() / expected.abs().max())
        for each in (near, found)
    ]
    assert differences[1] < LEAST + MORE * differences[0]
