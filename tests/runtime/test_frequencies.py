"""Rotary embeddings that change with the text's length: by the request, not by what came before."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.errors import CheckpointError
from offplan.runtime.model.frequencies import hold_frequencies
from offplan.runtime.session import Session
from tests.runtime.families import (
    BATCH,
    CHANGING,
    LIMIT,
    NUM_STEPS,
    PROMPT,
    load_stock,
    make_config,
    run_stock,
)
from tests.runtime.plans import group, offload, open_session
from tests.tiers import first_quick

PROMPTS = (PROMPT, BATCH, PROMPT[:, :LIMIT], PROMPT[:, :2], PROMPT)
"""Longer than the limit, growing beyond it, as long, far below it, and longer again."""


def save(family: str, variant: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = make_config(family, CHANGING[variant])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def run(session: Session, prompt: torch.Tensor) -> torch.Tensor:
    """Logits after the prompt and after each greedy token, [steps, batch, vocabulary]."""
    logits = [session.prefill(prompt).clone()]
    for _ in range(NUM_STEPS):
        logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("family", "variant"),
    first_quick([("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")]),
)
@pytest.mark.slow
def test_requests_of_one_session(family: str, variant: str, tmp_path: Path) -> None:
    folder = save(family, variant, tmp_path)
    stock = load_stock(folder)
    with open_session(folder, offload(group(2, 1), prefill_chunk=4)) as session:
        for prompt in PROMPTS:
            expected = run_stock(stock, prompt, cached=family != "phi3")
            torch.testing.assert_close(run(session, prompt), torch.stack(expected))


def test_a_text_that_outgrows_the_limit_is_read_again_once(tmp_path: Path) -> None:
    folder = save("phi3", "longrope", tmp_path)
    with open_session(folder, offload(group(1, 1), prefetch_step=1)) as session:
        read: list[torch.Tensor] = []
        prefill = session.runner.prefill
        session.runner.prefill = lambda text: read.append(text) or prefill(text)  # type: ignore
        session.prefill(PROMPT[:, : LIMIT - 1])
        for token in PROMPT[0, LIMIT - 1 :]:
            session.decode(token.view(1, 1))
        assert session.runner.length == PROMPT.shape[1]
    assert [text.tolist() for text in read] == [
        PROMPT[:, :length].tolist() for length in (LIMIT - 1, LIMIT + 1)
    ]


def test_changes_in_ways_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("llama", CHANGING["dynamic"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    hold_frequencies(model)
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", lambda *_: {})
    with pytest.raises(CheckpointError, match="in a way of its own"):
        hold_frequencies(model)
