"""Plans that copy nothing, so their times are sums: of no rule, and of one of ``max_bytes``."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from offplan.placement import build_slab
from offplan.plan import Backend, Rule
from offplan.planner.space import Option, Room, Space


class InPlace(NamedTuple):
    """A plan that copies nothing."""

    setting: int
    option: Option | None
    rule: Rule | None
    prompt_ps: int
    step_ps: int
    link_bytes: int
    """Bytes of one request that cross the link."""
    gpu_lack: float
    """Bytes by which it exceeds the GPU's budget; at most 0 where it fits."""
    host_lack: float


class _Reads(NamedTuple):
    """What parameters of one layer take when they are read in place."""

    slab_bytes: int
    prompt_bytes: list[int]
    """Bytes that a prompt reads, for each setting."""
    step_bytes: int


@dataclass(frozen=True)
class InPlaceRules:
    """The plans of a space that copy nothing, for any budget."""

    space: Space
    _reads: dict[tuple[Option, int, int], _Reads] = field(default_factory=dict)

    def plans(self, room: Room) -> Iterator[InPlace]:
        """List the plan of no rule, and those of ``max_bytes`` that take as little as fits.

        More of it would only move more bytes, so no other ``max_bytes`` can be better.
        """
        for setting in range(len(self.space.settings)):
            yield self._sum_up(room, setting, None, None, 0)
            needed = int(room.lacking_bytes[setting])
            for option in self._options if needed > 0 else ():
                yield self._sum_up(room, setting, option, *self._take(option, needed))

    @cached_property
    def _options(self) -> tuple[Option, ...]:
        read_always = (Backend.UVA, Backend.UVA)
        return tuple(each for each in self.space.options if each[1:] == read_always)

    @cached_property
    def _sums(self) -> dict[Option, list[int]]:
        """Bytes of a class's first parameters, in layer then name order: of one, of two, ..."""
        return {
            option: list(
                accumulate(
                    unit.nbytes
                    for kind in self.space.kind_of
                    for unit in self.space.taken[option.segment_class][kind]
                )
            )
            for option in self._options
        }

    def _take(self, option: Option, needed: int) -> tuple[Rule, int]:
        """Take an option's first parameters until there are enough bytes; returns their number."""
        sums = self._sums[option]
        last = min(bisect_left(sums, needed), len(sums) - 1)
        max_bytes = _roundest(sums[last - 1] if last else 0, sums[last])
        if self.space.engine is not None:
            multiple = self.space.engine.max_bytes_unit
            max_bytes = -(-max_bytes // multiple) * multiple
            last = min(bisect_left(sums, max_bytes), len(sums) - 1)
        rule = Rule(
            cpu_offload_params=option.segment_class.segments,
            max_bytes=max_bytes,
            prefill=option.prefill,
            decode=option.decode,
        )
        return rule, last + 1

    def _sum_up(
        self, room: Room, number: int, option: Option | None, rule: Rule | None, num_units: int
    ) -> InPlace:
        space, setting = self.space, self.space.settings[number]
        times = [
            setting.prefill.resident_ps + setting.row_ps[0],
            space.decode.resident_ps + setting.row_ps[1],
        ]
        crossing, host_bytes, off_gpu = list(setting.row_bytes), 0, 0
        if option is not None:
            off_gpu = self._sums[option][num_units - 1]
            # equal layers are read alike: only the last one may be taken in part
            for (kind, of_layer), count in self._layers(option, num_units).items():
                reads = self._read(option, kind, of_layer)
                host_bytes += count * reads.slab_bytes
                for phase, num_bytes in enumerate((reads.prompt_bytes[number], reads.step_bytes)):
                    times[phase] += count * space.reading_ps(num_bytes)
                    crossing[phase] += count * num_bytes
        first, second = space.weights
        return InPlace(
            setting=number,
            option=option,
            rule=rule,
            prompt_ps=times[0],
            step_ps=times[1],
            link_bytes=first * crossing[0] + second * crossing[1],
            gpu_lack=float(room.lacking_bytes[number] - off_gpu),
            host_lack=float(host_bytes - room.host_bytes[number]),
        )

    def _layers(self, option: Option, num_units: int) -> Counter[tuple[int, int]]:
        """Count the layers of each kind of which so many parameters are among the first ones."""
        counts: Counter[tuple[int, int]] = Counter()
        for kind in self.space.kind_of:
            of_layer = min(num_units, len(self.space.taken[option.segment_class][kind]))
            if of_layer:
                counts[kind, of_layer] += 1
            num_units -= of_layer
        return counts

    def _read(self, option: Option, kind: int, num_units: int) -> _Reads:
        found = self._reads.get((option, kind, num_units))
        if found is None:
            space, rule = self.space, option.rule(1, 1)
            units = space.taken[option.segment_class][kind][:num_units]
            found = self._reads[option, kind, num_units] = _Reads(
                build_slab((unit, rule) for unit in units).nbytes,
                space.prompt_read_bytes(units),
                space.step_read_bytes(units),
            )
        return found


def _roundest(low: int, high: int) -> int:
    """Return the roundest size above ``low`` and up to ``high``: all take the same parameters."""
    unit = 1 << high.bit_length()
    while high // unit * unit <= low:
        unit >>= 1
    return high // unit * unit
