"""The sequences at hand: how many there are, how long they are, where the next tokens go."""

import torch

from offplan.errors import InputError
from offplan.runtime.model.caches import Position


class Sequences:
    """A batch of sequences of one length, which is known to the host and to the device."""

    def __init__(self, device: torch.device, context: int) -> None:
        """Begin none; each may reach ``context`` tokens."""
        self.context = context
        self.batch = 0
        """Number of sequences that the cache is allocated for; 0 while it is not."""
        self.length = 0
        """Tokens of each sequence; 0 where none is begun."""
        self.position = Position(device)

    def set_length(self, num_tokens: int) -> None:
        """Say that the cache holds so many tokens; queued on the current stream."""
        self.position.tensor.fill_(num_tokens)
        self.length = num_tokens

    def extend(self) -> None:
        """Say that the cache holds one token more; queued on the current stream."""
        self.position.tensor.add_(1)
        self.length += 1

    def check_prompt(self, prompt: torch.Tensor) -> None:
        """Raise InputError for a prompt, [batch, tokens], that is empty or beyond the context."""
        batch, num_tokens = prompt.shape
        if not batch or not 0 < num_tokens <= self.context:
            raise InputError(
                f"the prompt has {num_tokens} tokens in each of {batch} sequences; the plan's "
                f"context is {self.context}"
            )

    def check_tokens(self, tokens: torch.Tensor) -> None:
        """Raise InputError for tokens that are not one for each sequence, or beyond the context.

        Raises ValueError where no sequence is begun.
        """
        if not self.length:
            raise ValueError("decode before prefill")
        if self.length >= self.context:
            raise InputError(f"the sequences have reached the context of {self.context} tokens")
        if tokens.shape != (self.batch, 1):
            raise InputError(
                f"decode wants tokens of shape {(self.batch, 1)}, found {tuple(tokens.shape)}"
            )
