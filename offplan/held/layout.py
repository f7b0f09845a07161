"""How a runner lays weights out on the GPU and in host memory, and the rules of its passes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from offplan.checkpoint.tensors import TensorInfo
from offplan.held.unit import Unit


@dataclass(frozen=True)
class Layout:
    """The bytes of layers' tensors if they are not the stored ones, by name."""

    gpu_growth: Mapping[str, Fraction] = field(default_factory=dict)
    """Times that a tensor grows at least on the GPU; tensors that are not here do not grow."""
    host_growth: Mapping[str, Fraction] | None = None
    """Times that a tensor grows where each parameter is page-locked by itself; None where slabs are
    page-locked."""
    grown_bytes: int = 0
    """Bytes by which the layers are larger at least on the GPU than they are stored."""
    padding_bytes: int = 0
    """Bytes of padding besides, which the engine leaves out once any of these tensors moves."""

    fused_weights: int = 0
    """Weights of the largest packed matrix that an engine fuses: their values are made at once."""

    def gpu_bytes(self, unit: Unit) -> int:
        """Bytes that a unit of a layer takes at least on the GPU."""
        return grow(unit.tensors, self.gpu_growth) if self.gpu_growth else unit.nbytes

    def host_bytes(self, units: Iterable[Unit], slab_bytes: int) -> int:
        """Bytes that units of one layer take at least in host memory, in a slab of so many."""
        if self.host_growth is None:
            return slab_bytes
        return grow((tensor for unit in units for tensor in unit.tensors), self.host_growth)


def grow(tensors: Iterable[TensorInfo], growth: Mapping[str, Fraction]) -> int:
    """Return the bytes of tensors, some of which grow so many times."""
    return int(sum(each.nbytes * growth.get(each.name, 1) for each in tensors))


AS_STORED = Layout()
"""Every tensor takes what it is stored in."""


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
