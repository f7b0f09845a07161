"""The tokens of a step that count; the others pass the layers for nothing.

They are those of the rows that a step extends, or the first tokens of a pass that checks drafts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offplan.transformers_private import list_experts

_UNKNOWN = (-1,)
"""Stands for rows that were chosen by a pass that may not have ended."""


class ExtendedRows:
    """Keeps idle rows of a step where they are, and has them read no expert of their own.

    The tensors that a captured step reads of it lie at one address. Works on the current stream.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Route for the experts of ``module``, before its layers are compiled."""
        self._device = device
        self._experts = list_experts(module)
        self._rows: Sequence[int] | None = None
        for experts in self._experts:
            vars(experts)["routed_as"] = None
            # whatever notes choices is to note these
            experts.register_forward_pre_hook(_route, prepend=True)
        self.allocate(1)

    def allocate(self, num_rows: int, num_tokens: int = 1) -> None:
        """Begin anew for so many rows, all of them extended; a pass has ``num_tokens`` of one."""
        self._rows = None
        self.moves = torch.ones(num_rows, dtype=torch.int64, device=self._device)
        """Growth of each row's position in a step: 0 for an idle row."""
        self._routed_as = torch.arange(num_rows, device=self._device)
        """The row whose experts each row's token is sent to: itself, or an extended one."""
        self._padded = torch.arange(num_tokens, device=self._device)
        """The same of the tokens of a pass: those that pad it are sent where the first is."""

    def invalidate(self) -> None:
        """Know of no rows that a step extends."""
        self._rows = _UNKNOWN

    def choose(self, rows: Sequence[int] | None) -> None:
        """Have the next step extend these rows of the cache, or all with None."""
        if rows == self._rows:
            return
        every = range(len(self.moves))
        extended = {*every} if rows is None else {*rows}
        stand_in = min(extended, default=0)
        self.moves.copy_(torch.tensor([int(row in extended) for row in every]))
        self._routed_as.copy_(torch.tensor([row if row in extended else stand_in for row in every]))
        self._rows = None if rows is None else [*rows]

    def pad(self, num_tokens: int) -> None:
        """Have the next pass of several tokens count so many; the others pad it."""
        places = torch.arange(len(self._padded))
        self._padded.copy_(places * (places < num_tokens))

    def enter(self, num_rows: int, num_tokens: int = 1) -> None:
        """Set the model up for a step of so many rows; 0 is for what is no step of rows.

        A pass of one row has ``num_tokens``.
        """
        routed_as = self._routed_as[:num_rows] if num_rows > 1 and self._rows is not None else None
        if num_tokens > 1 and num_rows:
            routed_as = self._padded[:num_tokens]
        for experts in self._experts:
            vars(experts)["routed_as"] = routed_as


def _route(experts: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Send each row's token to the experts that its stand-in chose, [tokens, choices].

    Nobody reads what an idle row computes, so the weights may stay its own.
    """
    rows = vars(experts)["routed_as"]
    if rows is None:
        return None
    hidden, chosen, *others = arguments
    chosen = chosen.view(len(rows), -1).index_select(0, rows).view_as(chosen)
    return (hidden, chosen, *others)
