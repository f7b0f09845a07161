"""Attention that a family computes in a method of its own, handed to transformers' interface."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from offplan.transformers_private import chosen_attention

INLINED_TYPES = ("codegen", "gpt_neox_japanese", "gptj")
"""Model types whose attention calls ``self._attn(query, key, value, mask)``. It divides scores by
the root of the heads' size and hides what the mask says, nothing else.

Source: transformers 5.23, ``GPTJAttention`` and those like it.
"""
_INTERFACE = AttentionInterface()


def hand_over(skeleton: PreTrainedModel) -> None:
    """Have such attentions of a model call the attention that its config names."""
    if skeleton.config.model_type in INLINED_TYPES:
        for module in skeleton.modules():
            if hasattr(module, "_attn"):
                vars(module)["_attn"] = partial(_attend, module, skeleton.config)


def _attend(
    module: nn.Module,
    config: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
) -> tuple[torch.Tensor, None]:
    """Return [batch, heads, new, dim] for tensors of this layout; rotary queries may be wider."""
    attend = _INTERFACE.get_interface(chosen_attention(config), None)
    out, _ = attend(module, query.to(value.dtype), key, value, attention_mask)
    return out.transpose(1, 2), None
