"""Plans that copy nothing, so their times are sums: of no rule, and of one of ``max_bytes``."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from offplan.placement import build_slab, off_gpu_bytes
from offplan.plan import Rule
from offplan.planner.space import Option, Room, Space


class InPlace(NamedTuple):
    """A plan that copies nothing."""

    setting: int
    rules: tuple[Rule, ...]
    rank: tuple[object, ...]
    """What the rule takes, as ``Option.rank``; empty for a plan of no rule."""
    times_ps: tuple[int, int]
    """Picoseconds of the prompt, and of a decode step."""
    link_bytes: int
    """Bytes of one request that cross the link."""
    gpu_lack: float
    """Bytes by which it exceeds the GPU's budget; at most 0 where it fits."""
    host_lack: float


class LayerReads(NamedTuple):
    """What the first parameters of a layer come to that an option takes."""

    slab_bytes: int
    host_bytes: int
    """Bytes in host memory; on engines those that are page-locked at least."""
    prompt: tuple[list[int], list[int]]
    """Picoseconds and bytes that a prompt reads at use, for each setting."""
    step: tuple[int, int]
    """Picoseconds and bytes that a decode step reads."""


@dataclass(frozen=True)
class InPlaceRules:
    """The plans of a space that copy nothing, for any budget."""

    space: Space
    _reads: dict[tuple[Option, int, int], LayerReads] = field(default_factory=dict)

    def plans(self, room: Room) -> Iterator[InPlace]:
        """List the plan of no rule, and those of ``max_bytes`` that take as little as fits.

        More of it would only move more bytes, so no other ``max_bytes`` can be better.
        """
        padding_bytes = self.space.stage.layout.padding_bytes
        for setting in range(len(self.space.settings)):
            yield self._plan(room, setting, None)
            for option in self._sums if room.lacking_bytes[setting] + padding_bytes > 0 else ():
                yield self._plan(room, setting, option)

    @cached_property
    def _sums(self) -> dict[Option, list[int]]:
        """Bytes of an option's first parameters, in layer then name order: of one, of two, ..."""
        space = self.space
        return {
            option: list(
                accumulate(
                    unit.nbytes
                    for kind in space.kind_of
                    for unit in space.taken[option.segment_class][kind]
                )
            )
            for option in space.options
            if option.prefill is option.decode and not option.decode.streams
        }

    @cached_property
    def _off_gpu(self) -> dict[Option, list[int]]:
        """What of these bytes leaves the GPU."""

        def leaving(option: Option, sums: list[int]) -> list[int]:
            if option.decode.gpu_bytes is None:
                return sums
            sizes = (later - sooner for sooner, later in pairwise([0, *sums]))
            ways = option.prefill, option.decode
            return list(accumulate(off_gpu_bytes(size, *ways) for size in sizes))

        return {option: leaving(option, sums) for option, sums in self._sums.items()}

    def _plan(self, room: Room, setting: int, option: Option | None) -> InPlace:
        space, table = self.space, self.space.table
        times = (table.resident_ps[setting] + table.row_ps[setting]).tolist()
        crossing = table.row_bytes[setting].tolist()
        rules: tuple[Rule, ...] = ()
        rank: tuple[object, ...] = ()
        host_bytes = off_gpu = copied = 0
        needed = int(room.lacking_bytes[setting]) + space.stage.layout.padding_bytes
        if option is not None:
            copied = self._copied_bytes(option)
            rule, num_units = self._take(option, needed + copied)
            rules, rank = (rule,), (*option.rank, rule.max_bytes)
            off_gpu = self._off_gpu[option][num_units - 1]
            for (kind, of_layer), count in self._layers(option, num_units).items():
                reads = self._read(option, kind, of_layer)
                host_bytes += count * reads.host_bytes
                of_phases = [each[setting] for each in reads.prompt], reads.step
                for phase, (read_ps, num_bytes) in enumerate(of_phases):
                    if copied:
                        passes = (int(table.num_chunks[setting]), 1)[phase]
                        times[phase] += count * passes * space.copying_ps(reads.slab_bytes)
                        crossing[phase] += count * passes * reads.slab_bytes
                    else:
                        times[phase] += count * read_ps
                        crossing[phase] += count * num_bytes
        return InPlace(
            setting,
            rules,
            rank,
            times_ps=(times[0], times[1]),
            link_bytes=int(np.dot(space.weights, crossing)),
            gpu_lack=float(needed + copied - off_gpu),
            host_lack=float(host_bytes - room.host_bytes[setting]),
        )

    def _take(self, option: Option, needed: int) -> tuple[Rule, int]:
        """Take an option's first parameters until there are enough bytes; returns their number."""
        sums, off_gpu = self._sums[option], self._off_gpu[option]
        last = bisect_left(off_gpu, min(needed, off_gpu[-1]))
        max_bytes = _roundest(sums[last - 1] if last else 0, sums[last])
        unit = self.space.runner.max_bytes_unit
        if unit > 1:  # and the engine may take no more than it is told
            max_bytes = -(-max(max_bytes, needed) // unit) * unit
            last = bisect_left(sums, min(max_bytes, sums[-1]))
        rule = option.rule(1, 1).model_dump(exclude={"group_size", "num_in_group"})
        return Rule(**{**rule, "max_bytes": max_bytes}), last + 1

    def _copied_bytes(self, option: Option) -> int:
        """Bytes of the copies of the largest layer that an option takes, on engines that copy."""
        engine = self.space.stage.runner.pass_rules
        if engine is None or not engine.copies_in_place:
            return 0
        taken = self.space.taken[option.segment_class]
        return engine.num_pools * max(sum(unit.nbytes for unit in units) for units in taken)

    def _layers(self, option: Option, num_units: int) -> Counter[tuple[int, int]]:
        """Count the layers of each kind of which so many parameters are among the first ones.

        Equal layers are read alike: only the last one may be taken in part.
        """
        counts: Counter[tuple[int, int]] = Counter()
        for kind in self.space.kind_of:
            of_layer = min(num_units, len(self.space.taken[option.segment_class][kind]))
            if of_layer:
                counts[kind, of_layer] += 1
            num_units -= of_layer
        return counts

    def _read(self, option: Option, kind: int, num_units: int) -> LayerReads:
        """What first parameters of a layer come to."""
        key, space = (option, kind, num_units), self.space
        if key not in self._reads:
            units, rule = space.taken[option.segment_class][kind][:num_units], option.rule(1, 1)
            slab_bytes = build_slab((unit, rule) for unit in units).nbytes
            self._reads[key] = LayerReads(
                slab_bytes,
                space.stage.layout.host_bytes(
                    (tensor for unit in units for tensor in unit.tensors), slab_bytes
                ),
                space.prompt_reads((unit, option.prefill) for unit in units),
                space.step_reads((unit, option.decode) for unit in units),
            )
        return self._reads[key]


def _roundest(low: int, high: int) -> int:
    """Return the roundest size above ``low`` and up to ``high``: all take the same parameters."""
    unit = 1 << high.bit_length()
    while high // unit * unit <= low:
        unit >>= 1
    return high // unit * unit
