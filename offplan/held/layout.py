"""How a runner lays weights out on the GPU and in host memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

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
