"""The same on a GPU, where copies and compute really run side by side."""

from pathlib import Path

import pytest
import torch

from offplan.checkpoint.open import open_model
from offplan.plan import Offload, Rule
from tests.runtime.plans import group, offload, open_session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

NUM_TOKENS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
BATCH = torch.tensor([[3, 14, 15, 9, 26], [58, 9, 7, 9, 3], [2, 38, 4, 6, 2]])

RULES: dict[str, tuple[Rule, ...]] = {
    "every layer": (group(1, 1),),
    "every second layer": (group(2, 1),),
    "four of five": (group(5, 4),),
    "attention": (group(1, 1, "self_attn"),),
    "prefetch, then in place": (group(2, 1, "mlp", decode="uva"),),
    "in place": (group(1, 1, "mlp", prefill="uva", decode="uva"),),
    "in chunks": (group(2, 1, "mlp"),),
    "two rules": (group(2, 1, "mlp", decode="uva"), group(1, 1, "self_attn", prefill="uva")),
}


def run(
    folder: Path, decision: Offload, prompt: torch.Tensor, capture: bool
) -> tuple[list[torch.Tensor], int, int]:
    """Logits, bytes that DMA moved in decode, and device memory that weights took."""
    before = torch.cuda.memory_allocated()
    with open_session(folder, decision, "cuda", capture=capture) as session, session.stream():
        weights = torch.cuda.memory_allocated() - before
        session.warm_up(*prompt.shape)
        logits = [session.prefill(prompt).clone()]
        moved = session.link.bytes_moved
        for _ in range(NUM_TOKENS):
            tokens = logits[-1].argmax(-1, keepdim=True)
            logits.append(session.decode(tokens).clone())
        return [entry.cpu() for entry in logits], session.link.bytes_moved - moved, weights


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("prefetch_step", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_logits_equal_resident(
    checkpoint: Path, name: str, prefetch_step: int, capture: bool
) -> None:
    rules, chunk = RULES[name], 4 if name == "in chunks" else 10
    untied = open_model(str(checkpoint)).input_embedding is not None
    for prompt in (PROMPT, BATCH):
        resident, _, all_weights = run(checkpoint, offload(prefill_chunk=chunk), prompt, capture)
        decision = offload(
            *rules,
            prefetch_step=prefetch_step,
            prefill_chunk=chunk,
            embeddings="host" if untied and name == "two rules" else "device",
        )
        got, moved, weights = run(checkpoint, decision, prompt, capture)
        assert all(map(torch.equal, got, resident))
        streams = any(rule.decode == "prefetch" for rule in rules)
        assert (moved > 0) == streams
        assert weights < all_weights
