"""Costs of reading weights in place, over the link and by the host's cores."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offplan.backends import Backend
from offplan.checkpoint.model_types import SHARED_BEHIND
from offplan.checkpoint.parameter import Role, role_of
from offplan.costs.cores import CoresUse, find_use
from offplan.costs.link import UnitUse
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import to_ps
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.routing.profile import BatchReuse

Served = Iterable[tuple[Unit, Backend]]
"""Units of one layer, each with the backend by which a pass gets at it."""


class CachedTimes(NamedTuple):
    """The costs of a layer in a pass by what lies in its cache, beside those of its other units."""

    keeping_ps: int
    """Picoseconds of kernels that keep the cache."""
    read: Counter[Backend]
    """Bytes read of what is cached, by backend."""
    missed_ps: int = 0
    """Picoseconds that the layer waits for what is missed, beyond ``read``."""
    cores: CoresUse | None = None
    """Work of the host's cores on what is missed."""
    later_bytes: int = 0
    """Bytes that cross for later passes, whose copies ``missed_ps`` counts in."""


def read_ps(backend: Backend, machine: MachineProfile, num_bytes: int) -> int:
    """Picoseconds in which a backend has so many bytes cross."""
    return to_ps(num_bytes / backend.rate(machine).value)


@dataclass(frozen=True)
class AtUse:
    """A pricer of in-place reads; it remembers what each unit of the stage has cross."""

    stage: Stage
    machine: MachineProfile
    batch: int
    """Sequences of a decode step."""
    tokens: int = 1
    """Tokens of each sequence that a decode step passes."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a decode step over all sequences."""
        return self.batch * self.tokens

    @cached_property
    def reuse(self) -> BatchReuse | None:
        """How a decode step's tokens choose experts; None if they choose all alike."""
        return self.stage.reuse(self.batch, self.tokens)

    def read_bytes(self, served: Served, priced: PassCompute) -> Counter[Backend]:
        """Bytes that a call of one layer reads in a pass, by backend, re-reads included.

        The host's cores read none of them.
        """
        reuse = self.reuse if priced.shapes[0].phase is Phase.DECODE else None
        by_backend: dict[Backend, list[Unit]] = {}
        for unit, backend in served:
            if not backend.is_by_cores:
                by_backend.setdefault(backend, []).append(unit)
        found = Counter[Backend]()
        for backend, units in by_backend.items():
            # what it fetches all chunks use; the kernels of each chunk read for themselves
            chunks = priced.chunks
            if backend.is_served:
                chunks = {sum(n * count for n, count in chunks.items()): 1}
            for num_tokens, count in chunks.items():
                read = sum(self._link_bytes(backend, unit, num_tokens, reuse) for unit in units)
                found[backend] += count * round(read)
        return found

    def read_ps(self, served: Served, priced: PassCompute) -> int:
        """Picoseconds that a call of one layer reads in a pass."""
        read = self.read_bytes(served, priced)
        return sum(read_ps(backend, self.machine, size) for backend, size in read.items())

    def cores(self, served: Served) -> CoresUse:
        """Find what the host's cores do of one layer in a decode step."""
        units = [unit for unit, backend in served if backend.is_by_cores]
        if not units:
            return CoresUse(num_bytes=0, num_products=0, slowness=1.0)
        use = find_use(units, self.machine, self.stage.experts, self.num_tokens, self.reuse)
        # where the cores multiply shared experts, too, they do so once the routed ones are done
        are_shared = any(role_of(each.parameters[0]) is Role.SHARED_EXPERTS for each in units)
        if are_shared or not any(each.is_expert for each in units):
            return use
        return use._replace(shared_bytes=self._shared_bytes[units[0].layer])

    @cached_property
    def _shared_bytes(self) -> list[int]:
        """Bytes of each layer's shared experts that its block multiplies behind routed ones."""
        if self.stage.model.model_type not in SHARED_BEHIND:
            return [0] * len(self.stage.layers)
        return [
            sum(each.nbytes for each in layer.parameters if role_of(each) is Role.SHARED_EXPERTS)
            for layer in self.stage.layers
        ]

    def _link_bytes(
        self, backend: Backend, unit: Unit, num_tokens: int, reuse: BatchReuse | None
    ) -> float:
        # units live as long as the stage
        key = backend, id(unit), num_tokens, reuse is None
        if key not in self._uses:
            use = UnitUse(unit, num_tokens, self.stage.experts, self.machine, reuse)
            self._uses[key] = backend.link_bytes(use)
        return self._uses[key]

    @cached_property
    def _uses(self) -> dict[tuple[Backend, int, int, bool], float]:
        return {}
