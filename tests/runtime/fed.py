"""Steps that are fed tokens, whatever is made, and how far from float32 their logits are."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from offplan.plan import Offload
from tests.runtime.plans import open_session

BATCH = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
FED = torch.tensor([[5, 8], [35, 9], [11, 2], [45, 38]])
"""Tokens of four steps, whatever is made: what differs is then the products alone."""


def run_fed(folder: Path, decision: Offload, device: str = "cpu") -> torch.Tensor:
    """Logits of each step, [steps, batch, vocabulary], of the same tokens."""
    with open_session(folder, decision, device) as session, session.stream():
        session.prefill(BATCH)
        fed = FED.to(session.device)
        made = [session.decode(tokens[:, None]).clone() for tokens in fed]
        return torch.stack(made).float().cpu()


def run_in_float32(folder: Path) -> torch.Tensor:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = stock(torch.cat([BATCH, FED.T], 1)).logits
    return made[:, BATCH.shape[1] :].transpose(0, 1).detach()


def typical_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """The median over tokens: one may be sent to other experts by what is rounded before them."""
    return float((logits - exact).abs().mean(-1).median())
