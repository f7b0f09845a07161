"""Plans that copy nothing: of no rule, and of one of ``max_bytes``."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from offplan.placement import off_gpu_bytes
from offplan.plan import Rule
from offplan.planner.option import Option
from offplan.planner.prices import Prices
from offplan.planner.space import Room, Space


class InPlace(NamedTuple):
    """A plan that copies nothing."""

    setting: int
    rules: tuple[Rule, ...]
    times_ps: tuple[float, float]
    """Picoseconds of the prompt, and of a decode step."""
    gpu_lack: float
    """Bytes by which it exceeds the GPU's budget; at most 0 if it fits."""
    host_lack: float


@dataclass(frozen=True)
class InPlaceRules:
    """The plans of a space that copy nothing, for any budget."""

    prices: Prices

    @property
    def space(self) -> Space:
        """The space."""
        return self.prices.space

    def plans(self, room: Room) -> list[InPlace]:
        """List the plan of no rule, and those of ``max_bytes`` that take as little as fits.

        More of it would only move more bytes, so no other ``max_bytes`` can be better.
        """
        padding_bytes = self.space.stage.layout.padding_bytes
        settings, rules, contents, lacks = [], [], [], []
        for setting, lacking in enumerate((room.lacking_bytes + padding_bytes).tolist()):
            for option in (None, *(self._sums if lacking > 0 else ())):
                rule, num_units, lack = self._take(option, lacking)
                settings.append(setting)
                rules.append(rule)
                contents.append(self._number(option, num_units))
                lacks.append(lack)
        numbers, of_plan = np.array(contents), np.array(settings)
        slots = np.ones_like(of_plan)
        times = self.prices.price(numbers, of_plan, slots)
        _, on_host, _ = self.prices.weigh(numbers, slots)
        columns = zip(*times, on_host - room.host_bytes[of_plan], strict=True)
        return [
            InPlace(setting, rule, (float(prompt_ps), float(step_ps)), float(lack), float(host))
            for setting, rule, lack, (prompt_ps, step_ps, host) in zip(
                settings, rules, lacks, columns, strict=True
            )
        ]

    @cached_property
    def _sums(self) -> dict[int, tuple[list[int], list[int]]]:
        """Bytes of an option's first parameters, in layer then name order: of one, of two, ...

        Beside them is what of these bytes leaves the GPU.
        """
        space, found = self.space, {}
        for number, option in enumerate(self.prices.options):
            ways = option.prefill, option.decode
            if ways[0] is ways[1] and not (option.decode.streams or option.has_curve):
                taken = space.taken(option.segment_class)
                sizes = [unit.nbytes for kind in space.kind_of for unit in taken[kind]]
                leaving = {size: off_gpu_bytes(size, *ways) for size in set(sizes)}
                off_gpu = accumulate(leaving[size] for size in sizes)
                found[number] = list(accumulate(sizes)), list(off_gpu)
        return found

    def _take(self, number: int | None, lacking: int) -> tuple[tuple[Rule, ...], int, int]:
        """Take an option's first parameters until there is enough room.

        Returns the rule, how many it takes, and the bytes that are lacking still.
        """
        if number is None:
            return (), 0, lacking
        option, (sums, off_gpu) = self.prices.options[number], self._sums[number]
        needed = lacking + self._copied_bytes(option)
        last = bisect_left(off_gpu, min(needed, off_gpu[-1]))
        max_bytes = _roundest(sums[last - 1] if last else 0, sums[last])
        unit = self.space.question.runner.max_bytes_unit
        if unit > 1:  # and the engine may take no more than it is told
            max_bytes = -(-max(max_bytes, needed) // unit) * unit
            last = bisect_left(sums, min(max_bytes, sums[-1]))
        rule = option.every_layer.model_dump(exclude={"group_size", "num_in_group"})
        return (Rule(**{**rule, "max_bytes": max_bytes}),), last + 1, needed - off_gpu[last]

    def _copied_bytes(self, option: Option) -> int:
        """Bytes of the copies of the largest layer that an option takes, on engines that copy."""
        engine = self.space.stage.pass_rules
        if engine is None or not engine.copies_in_place:
            return 0
        taken = self.space.taken(option.segment_class)
        return engine.num_pools * max(sum(unit.nbytes for unit in units) for units in taken)

    def _number(self, option: int | None, num_units: int) -> list[int]:
        """Number the contents of all layers of which an option's first parameters are taken."""
        none, _ = self._whole(None)
        if option is None:
            return none
        whole, ends = self._whole(option)
        last = min(bisect_left(ends, num_units), len(ends) - 1)
        left, kind = num_units - (ends[last - 1] if last else 0), self.space.kind_of[last]
        part = self.prices.number(kind, (option,), left)
        return [*whole[:last], part, *none[last + 1 :]]

    def _whole(self, option: int | None) -> tuple[list[int], list[int]]:
        """Number the contents of layers of which all is taken; sum up the parameters taken."""
        if option not in self._wholes:
            kinds, options = self.space.kind_of, () if option is None else (option,)
            sizes = [0] * len(kinds)
            if option is not None:
                taken = self.space.taken(self.prices.options[option].segment_class)
                sizes = [len(taken[kind]) for kind in kinds]
            numbers = [
                self.prices.number(kind, options if size else (), size)
                for kind, size in zip(kinds, sizes, strict=True)
            ]
            self._wholes[option] = numbers, list(accumulate(sizes))
        return self._wholes[option]

    @cached_property
    def _wholes(self) -> dict[int | None, tuple[list[int], list[int]]]:
        return {}


def _roundest(low: int, high: int) -> int:
    """Return the roundest size above ``low`` and up to ``high``: all take the same parameters."""
    unit = 1 << high.bit_length()
    while high // unit * unit <= low:
        unit >>= 1
    return high // unit * unit
