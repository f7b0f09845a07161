"""Llama 4's routed experts, made such that a token passes only those that it is sent to.

transformers multiplies every token by every expert, by those that it is not sent to as zeros.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from offplan.transformers_private import (
    Llama4TextExperts,
    Llama4TextMoe,
    let_experts_be_chosen,
    use_experts_implementation,
)


@use_experts_implementation(is_transposed=True)
class _Experts(Llama4TextExperts):
    """The same weights, multiplied as transformers is told to multiply all families' experts."""


class _Routed(Llama4TextMoe):
    """Weighs what goes into an expert, not what comes out of it, as the family does."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send hidden states, [..., hidden], through their experts and the shared one.

        Returns [tokens, hidden] and the router's logits, [tokens, experts].
        """
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        _, logits = self.router(hidden)
        scores, chosen = logits.topk(self.top_k, dim=1)
        weights = scores.float().sigmoid().to(hidden.dtype).unsqueeze(-1)
        pairs = (hidden.unsqueeze(1) * weights).flatten(0, 1)
        made = self.experts(pairs, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        out = self.shared_expert(hidden) + made.view(-1, self.top_k, self.hidden_dim).sum(1)
        return out, logits


def route(skeleton: PreTrainedModel) -> None:
    """Have Llama 4's layers in a model on the meta device multiply chosen experts alone."""
    layers: list[Any] = [part for part in skeleton.modules() if type(part) is Llama4TextMoe]
    for layer in layers:
        layer.__class__ = _Routed
        with torch.device("meta"):
            layer.experts = _Experts(skeleton.config.get_text_config()).to(skeleton.dtype)
    if layers:
        let_experts_be_chosen(skeleton)
