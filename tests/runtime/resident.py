"""Runs on a GPU by a plan, compared with runs that have every weight resident."""

import functools
from pathlib import Path

import torch

from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.placement import Phase
from offplan.plan import Offload
from tests.held import place
from tests.runtime.plans import offload, open_session

NUM_TOKENS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
BATCH = torch.tensor([[3, 14, 15, 9, 26], [58, 9, 7, 9, 3], [2, 38, 4, 6, 2]])


def run(folder: Path, decision: Offload, capture: bool) -> tuple[list[torch.Tensor], int, int]:
    """Logits of both prompts, bytes that DMA moved in decode, device memory that weights took."""
    before = torch.cuda.memory_allocated()
    logits: list[torch.Tensor] = []
    moved = 0
    with open_session(folder, decision, "cuda", capture=capture) as session, session.stream():
        weights = torch.cuda.memory_allocated() - before
        for prompt in (PROMPT, BATCH):
            session.warm_up(*prompt.shape)
            captured = {phase for phase, _ in session.runner._passes._captured}
            assert session.runner.captures_prompt(*prompt.shape) == (Phase.PREFILL in captured)
            logits.append(session.prefill(prompt).clone())
            moved -= session.link.bytes_moved
            for _ in range(NUM_TOKENS):
                tokens = logits[-1].argmax(-1, keepdim=True)
                logits.append(session.decode(tokens).clone())
            moved += session.link.bytes_moved
        return [entry.cpu() for entry in logits], moved, weights


@functools.cache
def run_resident(
    folder: Path, chunk: int, capture: bool, packing: Packing | None = None
) -> tuple[list[torch.Tensor], int]:
    decision = offload(prefill_chunk=chunk).model_copy(update={"packing": packing})
    logits, _, weights = run(folder, decision, capture)
    return logits, weights


def check_against_resident(folder: Path, decision: Offload, capture: bool) -> None:
    """Same logits as with everything resident, bytes that moved, memory that fell."""
    chunk, packing = decision.prefill_chunk, decision.packing
    resident, all_weights = run_resident(folder, chunk, capture, packing)
    got, moved, weights = run(folder, decision, capture)
    differences = [(a - b).abs().max().item() for a, b in zip(got, resident, strict=True)]
    assert differences == [0.0] * len(resident)
    placement = place(open_model(str(folder)), decision)
    # with no more layers than slots, every layer owns one and is as good as resident
    assert (moved > 0) == (len(placement.spans(Phase.DECODE)) > decision.prefetch_step)
    if placement.offloaded_bytes > placement.ring_bytes:
        assert weights < all_weights
