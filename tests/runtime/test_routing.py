"""What a session records of its routing is what its experts were called with, step by step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.checkpoint.open import open_model
from offplan.errors import InputError
from offplan.runtime.passes import routing
from offplan.runtime.session import Session
from tests.runtime.conftest import save_tiny
from tests.runtime.families import draw_weights, make_config
from tests.runtime.plans import group, offload
from tests.tiers import first_quick

FAMILIES = "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "ernie4_5_moe"
BATCHES = 2, 2, 1
NUM_STEPS = 4


def save(family: str, folder: Path) -> Path:
    """Save a tiny checkpoint of a family."""
    config = make_config(family, {})
    draw_weights(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return folder


def open_session(folder: Path, *, record: bool) -> Session:
    return Session(
        open_model(str(folder)),
        offload(group(2, 1)),
        context=32,
        device="cpu",
        folder=folder,
        record_routing=record,
    )


def run_steps(session: Session) -> Iterator[tuple[int, torch.Tensor]]:
    """Run three requests; yields the batch and the logits of each decode step."""
    for batch in BATCHES:
        logits = session.prefill(torch.arange(batch * 3).view(batch, 3) % 50)
        for _ in range(NUM_STEPS):
            logits = session.decode(logits.argmax(-1, keepdim=True))
            yield batch, logits.clone()


@pytest.mark.parametrize("family", first_quick(FAMILIES))
@pytest.mark.slow
def test_steps_are_those_that_experts_saw(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MOST_STEPS", 3)  # the host fetches in between
    folder = save(family, tmp_path)
    with open_session(folder, record=False) as session:
        plain = [logits for _, logits in run_steps(session)]
    seen: list[np.ndarray[Any, Any]] = []
    runs: dict[int, list[np.ndarray[Any, Any]]] = {2: [], 1: []}
    with open_session(folder, record=True) as session:
        for part in session.loaded.module.modules():
            if hasattr(part, "has_gate"):
                part.register_forward_pre_hook(lambda _, given: seen.append(given[1].numpy()))
        assert session.routing is not None
        for expected, (batch, logits) in zip(plain, run_steps(session), strict=True):
            assert torch.equal(logits, expected)
            # what came before the last layers of this step is of its prompt
            step = seen[-len(session.routing.layers) :]
            runs[batch].append(np.stack([each.reshape(batch, -1) for each in step]))
        recorded = session.routing.steps
    assert [run.shape[0] for run in recorded] == [2 * NUM_STEPS, NUM_STEPS]
    for run, expected_run in zip(recorded, runs.values(), strict=True):
        assert (run == np.stack(expected_run)).all()


def test_a_warm_up_is_forgotten(tmp_path: Path) -> None:
    with open_session(save("qwen3_moe", tmp_path), record=True) as session:
        session.warm_up(2, 3)
        assert session.routing is not None
        assert session.routing.steps == []


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no routed experts"):
        open_session(save_tiny("qwen3", tmp_path), record=True)
