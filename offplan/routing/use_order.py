"""The experts of each layer in the order of their last use, and what caches of them would hit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Steps = NDArray[np.integer]
"""Experts that tokens chose: [steps, layers, sequences, choices]."""


@dataclass(frozen=True)
class Reuse:
    """The place in the order of use of each choice of an expert, by layer."""

    distances: Counts
    """Choices of an expert that lay behind so many others, int64 of [layers, experts].

    A cache of n experts serves those that lay behind fewer than n others: of each size at once.
    Source: Mattson et al. 1970, "Evaluation techniques for storage hierarchies".
    """
    first_uses: Counts
    """Choices of an expert that had not been used before, int64 of [layers]."""
    num_steps: int
    """Steps that were taken."""

    def __add__(self, other: "Reuse") -> "Reuse":
        return Reuse(
            self.distances + other.distances,
            self.first_uses + other.first_uses,
            self.num_steps + other.num_steps,
        )

    @property
    def choices(self) -> Counts:
        """Distinct experts that all steps chose, summed up, int64 of [layers]."""
        choices: Counts = self.distances.sum(1) + self.first_uses
        return choices


class UseOrder:
    """Keeps, for each layer, its experts in the order of their last use.

    The experts of a step move to the front together and keep the order that they had among
    themselves. Experts that no step has used lie behind all others, by their index. A cache of n
    experts holds the first n, so one order gives the hits of caches of every size.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Begin with no expert used."""
        self.order: Counts = np.tile(np.arange(num_experts), (num_layers, 1))
        """Experts by their last use, the latest first, int64 of [layers, experts]."""
        self.num_used: Counts = np.zeros(num_layers, np.int64)
        """Experts of each layer that have been used; they lie first."""
        self.reuse = Reuse(np.zeros_like(self.order), np.zeros(num_layers, np.int64), 0)

    def take(self, chosen: NDArray[np.integer]) -> None:
        """Take the experts that a step chose, [layers, choices]; one chosen twice counts once."""
        num_layers, num_experts = self.order.shape
        is_chosen = np.zeros((num_layers, num_experts), bool)
        np.put_along_axis(is_chosen, chosen.astype(np.int64), values=True, axis=1)
        in_order = np.take_along_axis(is_chosen, self.order, axis=1)
        is_used = np.arange(num_experts) < self.num_used[:, None]
        hits = in_order & is_used
        first_uses = (in_order & ~is_used).sum(1)
        self.reuse += Reuse(hits.astype(np.int64), first_uses, 1)
        self.num_used += first_uses
        # stable: both the chosen and the others keep the order that they had
        places = np.argsort(~in_order, axis=1, kind="stable")
        self.order = np.take_along_axis(self.order, places, axis=1)


def measure_reuse(steps: Steps, num_experts: int, batch: int) -> Reuse:
    """Measure the reuse of steps for batches of ``batch`` of their sequences.

    Sequences are taken in
    groups of ``batch``, each with an order of its own; a rest of fewer is left out.
    """
    _, num_layers, num_sequences, _ = steps.shape
    reuse = UseOrder(num_layers, num_experts).reuse
    for begin in range(0, num_sequences - batch + 1, batch):
        order = UseOrder(num_layers, num_experts)
        for step in steps[:, :, begin : begin + batch]:
            order.take(step.reshape(num_layers, -1))
        reuse += order.reuse
    return reuse
