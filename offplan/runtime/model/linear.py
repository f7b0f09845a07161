"""Linear attention by the gated delta rule, as transformers' own modules compute it with torch.

They go on from the state that the cache keeps. One token takes the rule itself, more tokens its
form over chunks of 64. A prompt may come in parts of any length. Source: Gated DeltaNet (arXiv
2412.06464).
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from offplan.kernel_sizes import SPAN_TOKENS
from offplan.runtime.refusal import refuse
from offplan.transformers_private import GATED_DELTA_NETS, compute_by_torch


def find_linear(layers: Iterable[nn.Module]) -> list[nn.Module | None]:
    """Return each layer's linear attention, None if it has none that is known here."""
    return [
        next((part for part in layer.modules() if type(part).__name__ in GATED_DELTA_NETS), None)
        for layer in layers
    ]


def take_in_spans(layers: Iterable[nn.Module]) -> None:
    """Have linear attentions take many tokens in spans, and be compiled for single ones alone.

    They compute by transformers' code in torch; raises CheckpointError if that is not found.
    """
    linear: Any
    for linear in filter(None, find_linear(layers)):
        if not compute_by_torch(linear):
            raise refuse(
                f"{type(linear).__name__} is a linear attention whose code in torch is not found "
                f"in transformers {transformers.__version__}"
            )
        own: Any = type(linear)
        linear.__class__ = _class_in_spans(own)


class _InSpans(nn.Module):
    """Stands before the class of a linear attention, whose forward it calls."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Mix new tokens, [batch, new, hidden size], with those before; returns the same shape."""
        if hidden_states.shape[1] == 1:
            single: torch.Tensor = super().forward(hidden_states, **arguments)
            return single
        return self.take(hidden_states, **arguments)

    @torch.compiler.disable  # the rule's loop would be unrolled into thousands of operations
    def take(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Compute the same span by span."""
        own, spans = super().forward, hidden_states.split(SPAN_TOKENS, dim=1)
        return torch.cat([own(span, **arguments) for span in spans], 1)


@cache  # layers of two classes would be compiled twice
def _class_in_spans(own: Any) -> Any:
    return type(own.__name__, (_InSpans, own), {})
