"""What a pass may be asked for: whether texts fit the plan's context, and a step its sequences."""

import torch

from offplan.errors import InputError


def require_prompt(prompt: torch.Tensor, context: int) -> None:
    """Raise InputError for a prompt that is empty or beyond the context."""
    batch, num_tokens = prompt.shape
    if not batch or not 0 < num_tokens <= context:
        raise InputError(
            f"the prompt has {num_tokens} tokens in each of {batch} sequences; the plan's "
            f"context is {context}"
        )


def require_step(tokens: torch.Tensor, length: int, batch: int, context: int) -> None:
    """Raise InputError for tokens that are not one for each sequence, or beyond the context.

    ``length`` are the tokens of each; raises ValueError if no sequence is begun.
    """
    if not length:
        raise ValueError("decode before prefill")
    if length >= context:
        raise InputError(f"the sequences have reached the context of {context} tokens")
    if tokens.shape != (batch, 1):
        raise InputError(f"decode wants tokens of shape {(batch, 1)}, found {tuple(tokens.shape)}")
