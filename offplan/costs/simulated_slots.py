"""Simulates steps that choose experts as a routing profile has it, and the slots of a layer.

What the host's cores multiply enters a slot only if the link brings it for later. So the slots hold
other experts than those used last, and how many steps then miss depends on more than how soon each
is chosen again: popular experts are, others are not. No formula has been found that comes within a
tenth of a list's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.routing.profile import BatchReuse
from offplan.routing.use_order import AGES, age_bands, age_of_band, next_ages, place_bands

NUM_STEPS, NUM_BEFORE = 1000, 300
"""Steps of a simulation, and those of these that come before any is counted."""
_ROWS = 512
"""Experts of all layers that are simulated at a time, beside one another."""
_SIZES = 16
"""Numbers of kept experts that are simulated, from one to nearly all."""
_PARTS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0, 6.0)
"""What is brought for later that is simulated, as parts of what steps miss if all enter slots."""
_SEED = 64


class Simulated(NamedTuple):
    """Experts that steps miss over those that they would if all chosen experts entered slots."""

    sizes: NDArray[np.int64]
    """Numbers of kept experts."""
    ratios: NDArray[np.float64]
    """By number of kept experts and of _PARTS, [sizes, parts]."""

    def at(self, num_kept: float, part: float) -> float:
        """Interpolate for so many kept experts, and what is brought for later of what is missed."""
        of_size = [np.interp(part, _PARTS, row) for row in self.ratios]
        return float(np.interp(num_kept, self.sizes, of_size))


def simulate(reuse: BatchReuse, not_brought: Sequence[int], most_later: int) -> Simulated:
    """Simulate layers of the profile's mean layer.

    ``not_brought`` are the experts that enter no slot at once, by how many a step misses: one
    number more than a step chooses. ``most_later`` are brought for later in one step, at most.
    """
    num_experts = len(reuse.layers[0].distances)
    chances, present = _find_chances(reuse)
    random, num_layers = np.random.default_rng(_SEED), max(1, _ROWS // num_experts)
    sizes = np.unique(np.linspace(0, num_experts, _SIZES, endpoint=False, dtype=int).clip(1))
    of_all = np.array([reuse.touched * (1 - reuse.hit_rate(size)) for size in sizes.tolist()])
    quotas = of_all[:, None] * _PARTS
    places = np.arange(num_experts)
    drawn = random.random((num_layers, num_experts))[..., None] * present.sum(axis=1)[:, None]
    bands = (drawn > np.cumsum(present, axis=1)).sum(axis=-1)
    ages = age_of_band(bands)
    is_kept = np.broadcast_to(
        places < sizes[:, None, None], (num_layers, len(sizes), len(_PARTS), num_experts)
    ).copy()
    credit = np.zeros(is_kept.shape[:-1])
    most, of_cores = len(not_brought) - 1, np.array(not_brought)
    missed, missed_of_all = np.zeros(credit.shape[1:]), np.zeros(len(sizes))
    for number in range(NUM_STEPS):
        is_chosen = _draw(random, chances[places, age_bands(ages)], reuse.touched)
        chosen = is_chosen[:, None, None]
        is_missed, is_hit = chosen & ~is_kept, chosen & is_kept
        nth = np.cumsum(is_missed, axis=-1, dtype=np.int32)
        num_missed = np.minimum(nth[..., -1], most)
        num_later = of_cores[num_missed]
        left = sizes[:, None] - is_hit.sum(axis=-1)
        brought = np.minimum(num_missed - num_later, left)
        credit = np.minimum(credit + quotas, most_later)
        later = np.minimum(np.minimum(num_later, np.floor(credit)), left - brought)
        credit -= later
        # the cores' come behind all that the link brings, whether or not that found a slot
        behind = nth - (num_missed - num_later)[..., None]
        enters = (nth <= brought[..., None]) | ((behind > 0) & (behind <= later[..., None]))
        is_idle = is_kept & ~chosen
        room = (left - brought - later)[..., None]
        is_idle &= np.cumsum(is_idle, axis=-1, dtype=np.int32) <= room
        is_kept = is_hit | (is_missed & enters) | is_idle
        order = np.argsort(~is_chosen, axis=1, kind="stable")
        ages = np.take_along_axis(next_ages(ages, is_chosen), order, axis=1)
        is_kept = np.stack([of[..., at] for of, at in zip(is_kept, order, strict=True)])
        if number >= NUM_BEFORE:
            missed += nth[..., -1].sum(axis=0)
            missed_of_all += (is_chosen & (places >= sizes[:, None, None])).sum(axis=(1, 2))
    return Simulated(sizes, missed / np.maximum(1, missed_of_all)[:, None])


def _draw(
    random: np.random.Generator, chances: NDArray[np.float64], num_chosen: float
) -> NDArray[np.bool_]:
    """Draw the experts of a step, so many in the mean, by their chances: [layers, experts].

    Chances add up in a random order, and each whole number that the sum passes is an expert.
    Source: Madow 1949, systematic sampling.
    """
    order = np.argsort(random.random(chances.shape[1]))
    chances = chances * (num_chosen / chances.sum(axis=1, keepdims=True))
    passed = np.cumsum(chances[:, order], axis=1) + random.random((len(chances), 1))
    drawn = np.empty(chances.shape, dtype=np.bool_)
    drawn[:, order] = np.diff(np.floor(passed), axis=1, prepend=0) > 0
    return drawn


def _find_chances(reuse: BatchReuse) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Find how likely a step chooses an expert, by place and band of age, and how many lie there.

    Experts that had not been used before count as used long ago.
    """
    distances = np.array([each.distances for each in reuse.layers], dtype=np.float64).sum(axis=0)
    num_experts = len(distances)
    half = num_experts // 2
    distances[half:] += sum(each.first_uses for each in reuse.layers) / (num_experts - half)
    chances = distances[:, None] / (reuse.steps * len(reuse.layers)) * np.ones(AGES)
    if reuse.again is None:
        return chances, np.ones_like(chances)
    chosen, present = np.array(reuse.again, dtype=np.float64).transpose(2, 0, 1)
    mean = (1 + chosen.sum(axis=1, keepdims=True)) / (1 + present.sum(axis=1, keepdims=True))
    # few counts say little: they are taken for as many experts that are chosen as often as all
    beyond = (chosen + mean) / (present + 1) / mean
    bands = place_bands(num_experts)
    return np.minimum(1.0, chances * beyond[bands]), 1e-9 + present[bands]
