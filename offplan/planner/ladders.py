"""Ladders of all options, in arrays: what the rungs take that a plan has memory left for."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offplan.planner.options import Ladder
from offplan.planner.space import Space

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ladders:
    """Ladders by option, kind of layer and number of rungs.

    The row after the last option, and that of an option without ladders, has nothing but zeros.
    """

    space: Space

    @cached_property
    def climbs(self) -> NDArray[np.bool_]:
        """Whether an option has ladders, [options + 1]."""
        return np.array([*(option.climbs for option in self.space.options), False])

    @cached_property
    def _found(self) -> dict[tuple[int, int], Ladder]:
        """The ladders by option and kind."""
        kinds, options = range(len(self.space.units)), enumerate(self.space.options)
        every = ((n, kind, each.ladder(self.space, kind)) for n, each in options for kind in kinds)
        return {(number, kind): ladder for number, kind, ladder in every if ladder is not None}

    @cached_property
    def num_rungs(self) -> int:
        """Rungs of every ladder: of the shortest one."""
        return min((each.times_ps.shape[1] - 1 for each in self._found.values()), default=0)

    def _fill(self, name: str, *shape: int) -> Ints:
        """Return a field of all ladders, [options + 1, kinds, ...]."""
        found = np.zeros((len(self.climbs), len(self.space.units), *shape), dtype=np.int64)
        for at, ladder in self._found.items():
            value = getattr(ladder, name)
            found[at] = value[..., : self.num_rungs + 1] if shape else value or 0
        return found

    @cached_property
    def rung_bytes(self) -> Ints:
        """Bytes of a rung, [options + 1, kinds]; 0 where a kind has none."""
        return self._fill("rung_bytes")

    @cached_property
    def fixed_bytes(self) -> Ints:
        """Bytes that come with the first rung, [options + 1, kinds]."""
        return self._fill("fixed_bytes")

    @cached_property
    def none_ps(self) -> Ints:
        """Picoseconds of a decode step with no rung, [options + 1, kinds]."""
        return self._fill("none_ps")

    @cached_property
    def times_ps(self) -> Ints:
        """``Ladder.times_ps``, [5, options + 1, kinds, rungs + 1]."""
        times: Ints = self._fill("times_ps", 5, self.num_rungs + 1).transpose(2, 0, 1, 3)
        return times

    @cached_property
    def curves(self) -> NDArray[np.float64]:
        """A decode step's time over that with no rung, [options + 1, rungs + 1]."""
        found = np.zeros((len(self.climbs), self.num_rungs + 1))
        for (option, _), ladder in self._found.items():
            times = ladder.times_ps[2:4, : self.num_rungs + 1].sum(axis=0)
            found[option] = np.append(ladder.none_ps, times[1:]) / max(1, ladder.none_ps)
        return found

    @cached_property
    def _asked(self) -> Ints:
        """Rungs that each layer must have, [options + 1]; 0 where any number will do."""
        return np.asarray(self._fill("asked").max(axis=1))

    def climb(self, option: Ints, takes: Ints, spare: Ints) -> Ints:
        """Spend spare bytes on rungs; returns those of each layer, [candidates, layers].

        ``takes`` is 1 for layers that the rule takes. All layers have as many, the first ones one
        more. All have 0 where fewer bytes are spare than one rung of each layer takes, or than were
        asked for.
        """
        kinds = np.array(self.space.kind_of)
        of_layer = takes * self.rung_bytes[option][:, kinds]
        takes = (of_layer > 0).astype(np.int64)
        fixed = (takes * self.fixed_bytes[option][:, kinds]).sum(axis=1)
        largest = np.maximum(1, of_layer.max(axis=1))
        num_layers = takes.sum(axis=1)
        total = np.minimum((spare - fixed) // largest, self.num_rungs * num_layers)
        asked = self._asked[option] * num_layers
        total = np.where(asked > 0, np.where(total >= asked, asked, 0), total)
        total = np.where(total >= num_layers, total, 0)
        each, more = np.divmod(total, np.maximum(1, num_layers))
        is_first = np.cumsum(takes, axis=1) <= more[:, None]
        rungs: Ints = takes * (each[:, None] + is_first)
        return rungs
