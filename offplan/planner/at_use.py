"""What layers take at use: reading over the link, and products by the host's cores."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from offplan.backends import Backend
from offplan.costs.cores import find_use
from offplan.costs.link import UnitUse, group_by_backend, times_read
from offplan.costs.timeline import to_ps
from offplan.held.unit import Unit
from offplan.planner.space import Space
from offplan.routing.profile import BatchReuse

Served = Iterable[tuple[Unit, Backend]]
"""Units of one layer, each with the backend that reads it at use."""


@dataclass(frozen=True)
class AtUse:
    """Prices what a layer of a space reads at use; remembers what each unit has cross."""

    space: Space

    def prompt_reads(self, served: Served) -> list[int]:
        """Picoseconds that prompts read one layer at use, for each setting."""
        settings = self.space.settings
        chunks = [[shape.num_tokens for shape in each.prefill.shapes] for each in settings]
        times = [0] * len(settings)
        for backend, units in group_by_backend(served).items():
            reads = [times_read(backend, tokens) for tokens in chunks]
            read = {n: self._use_bytes(backend, units, n) for n in set().union(*reads)}
            for number, counts in enumerate(reads):
                num_bytes = sum(count * read[n] for n, count in counts.items())
                times[number] += self.space.reading_ps(num_bytes, backend)
        return times

    def step_reads(self, served: Served) -> int:
        """Picoseconds that a decode step reads one layer at use."""
        space, batch = self.space, self.space.question.workload.batch
        return sum(
            space.reading_ps(self._use_bytes(backend, units, batch, space.reuse), backend)
            for backend, units in group_by_backend(served).items()
            if not backend.is_by_cores
        )

    def cores_ps(self, units: Sequence[Unit], *, beside: bool = False) -> int:
        """Picoseconds that a layer of a decode step waits for the host's cores."""
        if not units:
            return 0
        space, batch = self.space, self.space.question.workload.batch
        use = find_use(units, space.machine, space.stage.experts, batch, space.reuse)
        return to_ps(use.seconds(space.machine, beside=beside))

    def _use_bytes(
        self,
        backend: Backend,
        units: Sequence[Unit],
        num_tokens: int,
        reuse: BatchReuse | None = None,
    ) -> int:
        return round(sum(self._link_bytes(backend, unit, num_tokens, reuse) for unit in units))

    def _link_bytes(
        self, backend: Backend, unit: Unit, num_tokens: int, reuse: BatchReuse | None
    ) -> float:
        # units live as long as the space
        key = backend, id(unit), num_tokens, reuse is None
        if key not in self._uses:
            space = self.space
            use = UnitUse(unit, num_tokens, space.stage.experts, space.machine, reuse)
            self._uses[key] = backend.link_bytes(use)
        return self._uses[key]

    @cached_property
    def _uses(self) -> dict[tuple[Backend, int, int, bool], float]:
        return {}
