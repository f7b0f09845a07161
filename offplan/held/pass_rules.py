"""How an engine runs a pass."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PassRules:
    """How an engine runs a pass; ``costs.engine_times`` has what all engines do alike."""

    copies_in_place: bool
    """True if the engine copies what it is told to read in place, each layer before it runs."""
    allocates_copies: bool
    """True if the engine allocates each copy anew, and only then frees the layer that has run,
    which holds one slot of the ring. After the last layers it then copies the first ones in their
    order. Elsewhere each slot is filled again by the first of its own layers."""
    copies_first_again: bool
    """True if a captured step copies again what the step before it has left in the ring."""
    shares_blocks: bool
    """True if caches of all layers lie in blocks of one size (``vllm_cache``)."""
    num_pools: int = 1
    """Pools of GPU memory that hold the engine's copies."""
    beside_percent: int | None = None
    """Percent of the link's time that a captured step's copies take while layers run beside them.
    It is None if nothing is computed while a layer is copied."""
    copy_gap_ps: int = 0
    """Picoseconds that each such copy takes besides, to begin behind a layer and to be awaited."""
    layer_overhead_s: float | None = None
    """Seconds that a layer's launches and small kernels take; None for the machine's figure."""
    routed_overhead_s: float = 0.0
    """Seconds that routed experts add to that."""
    all_reduce_s: float = 0.0
    """Seconds that GPUs of tensor parallelism take to add up what they computed, which they do
    twice in a layer."""

    def step_copy_ps(self, copy_ps: int) -> int:
        """Return the picoseconds in a captured step of a copy that takes so many alone."""
        if self.beside_percent is None:
            return copy_ps
        return copy_ps * self.beside_percent // 100 + self.copy_gap_ps

    def overhead_s(self, *, is_routed: bool, num_gpus: int) -> float | None:
        """Return the seconds that a layer takes beside its roofline; None for the machine's."""
        if self.layer_overhead_s is None:
            return None
        exchanging = 2 * self.all_reduce_s if num_gpus > 1 else 0.0
        return self.layer_overhead_s + is_routed * self.routed_overhead_s + exchanging

    def slots_ahead(self, num_slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of a ring's slots are filled ahead of the layer that runs."""
        return np.maximum(1, num_slots - self.allocates_copies)
