"""The experts of each layer in the order of their last use, and what caches of them would hit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AGES, PLACES = 12, 32
"""Rows and columns of ``Reuse.again``: bands of ages, and of places, at most."""
_TO_AGE = 0.3
"""Part by which a choice moves an expert's age to its place. Source: chosen, by simulated caches of
traces whose experts are popular, or follow the last tokens'."""
_AGES_A_DOUBLING = 1.5
"""Bands of ages for each doubling of the place."""

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
    again: Counts
    """Experts by the band of their place and that of their age: how many were chosen, and how many
    lay there, over all steps and layers, int64 of [PLACES, AGES, 2]."""

    def __add__(self, other: "Reuse") -> "Reuse":
        return Reuse(
            self.distances + other.distances,
            self.first_uses + other.first_uses,
            self.num_steps + other.num_steps,
            self.again + other.again,
        )

    @property
    def choices(self) -> Counts:
        """Distinct experts that all steps chose, summed up, int64 of [layers]."""
        choices: Counts = self.distances.sum(1) + self.first_uses
        return choices


def place_bands(num_experts: int) -> Counts:
    """Return the band of each place of the order of use: one for each doubling."""
    bands: Counts = np.log2(np.arange(1, num_experts + 1)).astype(np.int64)
    return bands


def num_bands(num_experts: int) -> int:
    """Count the bands of the places of so many experts."""
    return num_experts.bit_length()


def age_bands(ages: NDArray[np.float64]) -> Counts:
    """Return the bands of ages."""
    bands: Counts = np.clip(_AGES_A_DOUBLING * ages, 0, AGES - 1).astype(np.int64)
    return bands


def age_of_band(bands: Counts) -> NDArray[np.float64]:
    """Return the age in the middle of each band."""
    return np.asarray((bands + 0.5) / _AGES_A_DOUBLING, dtype=np.float64)


def next_ages(ages: NDArray[np.float64], is_chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Move the ages of chosen experts, of [..., experts] in the order of use, to their places.

    An age is a mean over an expert's choices, the last ones most: of the logarithm of the place at
    which it was chosen. Popular experts have low ages.
    """
    places = np.log2(np.arange(1, ages.shape[-1] + 1))
    moved: NDArray[np.float64] = ages + _TO_AGE * is_chosen * (places - ages)
    return moved


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
        self.ages = np.full((num_layers, num_experts), np.log2(max(1, num_experts / 2)))
        """Ages of the experts, in the order of ``order``."""
        again = np.zeros((PLACES, AGES, 2), np.int64)
        self.reuse = Reuse(np.zeros_like(self.order), np.zeros(num_layers, np.int64), 0, again)
        self._places = np.broadcast_to(place_bands(num_experts), self.order.shape)

    def take(self, chosen: NDArray[np.integer]) -> None:
        """Take the experts that a step chose, [layers, choices]; one chosen twice counts once."""
        num_layers, num_experts = self.order.shape
        is_chosen = np.zeros((num_layers, num_experts), bool)
        np.put_along_axis(is_chosen, chosen.astype(np.int64), values=True, axis=1)
        in_order = np.take_along_axis(is_chosen, self.order, axis=1)
        is_used = np.arange(num_experts) < self.num_used[:, None]
        hits = in_order & is_used
        first_uses = (in_order & ~is_used).sum(1)
        bands = AGES * self._places + age_bands(self.ages)
        counts = [np.bincount(bands[each], minlength=PLACES * AGES) for each in (hits, is_used)]
        again = np.stack(counts, axis=-1).reshape(PLACES, AGES, 2).astype(np.int64)
        self.reuse += Reuse(hits.astype(np.int64), first_uses, 1, again)
        self.num_used += first_uses
        # stable: both the chosen and the others keep the order that they had
        places = np.argsort(~in_order, axis=1, kind="stable")
        self.order = np.take_along_axis(self.order, places, axis=1)
        self.ages = np.take_along_axis(next_ages(self.ages, in_order), places, axis=1)


def join_steps(steps: Steps, tokens: int) -> Steps:
    """Return steps that pass so many consecutive tokens of each sequence; a rest is left out."""
    num_steps, num_layers, num_sequences, _ = steps.shape
    passes = num_steps // tokens
    grouped = steps[: passes * tokens].reshape(passes, tokens, num_layers, num_sequences, -1)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(passes, num_layers, num_sequences, -1)


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
