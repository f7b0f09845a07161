"""The numbers of all options' rules, in arrays: what they take of the GPU, and what they cost.

``planner.options`` says what each option has: a ladder, parts, or neither. The row after the last
option, and that of an option without either, has nothing but zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offplan.costs.steady import PartTable, PassTable
from offplan.placement import PART_SLOTS
from offplan.planner.aims import Floats
from offplan.planner.candidates import NO_RULE, Ints
from offplan.planner.options import Ladder, Option, Parts
from offplan.planner.space import Space

Each = TypeVar("Each", Ladder, Parts)


class Own(NamedTuple):
    """The numbers of candidates, of which one rule at most has any."""

    option: Ints
    """The rule's option; NO_RULE where none has numbers, [candidates]."""
    takes: Ints
    """1 for the layers that the rule takes, [candidates, layers]."""
    rungs: Ints
    """The rungs that each layer has memory for, [candidates, layers]."""


@dataclass(frozen=True)
class Numbers:
    """Ladders by option, kind of layer and number of rungs, and parts by option and kind."""

    space: Space

    @cached_property
    def climbs(self) -> NDArray[np.bool_]:
        """Whether an option has ladders, [options + 1]."""
        return np.array([*(option.climbs for option in self.space.options), False])

    @cached_property
    def _has_own(self) -> NDArray[np.bool_]:
        """Whether an option has ladders or parts, [options + 1]."""
        return self.climbs | (self.shared_bytes > 0)

    @cached_property
    def _ladders(self) -> dict[tuple[int, int], Ladder]:
        """The ladders by option and kind."""
        return self._find(lambda option, kind: option.ladder(self.space, kind))

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Parts]:
        """The parts by option and kind."""
        return self._find(lambda option, kind: option.parts(self.space, kind))

    def _find(self, ask: Callable[[Option, int], Each | None]) -> dict[tuple[int, int], Each]:
        kinds, options = range(len(self.space.units)), enumerate(self.space.options)
        every = ((number, kind, ask(each, kind)) for number, each in options for kind in kinds)
        return {(number, kind): each for number, kind, each in every if each is not None}

    @cached_property
    def num_rungs(self) -> int:
        """Rungs of every ladder: of the shortest one."""
        return min((each.times_ps.shape[1] - 1 for each in self._ladders.values()), default=0)

    def _fill(self, name: str, *shape: int) -> Ints:
        """Return a field of all ladders or parts, [options + 1, kinds, ...]."""
        found = np.zeros((len(self.climbs), len(self.space.units), *shape), dtype=np.int64)
        every = self._ladders if name in Ladder._fields else self._parts
        for at, each in every.items():
            value = getattr(each, name)
            found[at] = value[..., : shape[-1]] if shape else value or 0
        return found

    @cached_property
    def rung_bytes(self) -> Ints:
        """Bytes of a rung, [options + 1, kinds]; 0 where a kind has none."""
        return self._fill("rung_bytes")

    @cached_property
    def _fixed_bytes(self) -> Ints:
        """Bytes that come with the first rung, [options + 1, kinds]."""
        return self._fill("fixed_bytes")

    @cached_property
    def none_ps(self) -> Ints:
        """Picoseconds of a decode step with no rung, [options + 1, kinds]."""
        return self._fill("none_ps")

    @cached_property
    def _times_ps(self) -> Ints:
        """``Ladder.times_ps``, [5, options + 1, kinds, rungs + 1]."""
        times: Ints = self._fill("times_ps", 5, self.num_rungs + 1).transpose(2, 0, 1, 3)
        return times

    @cached_property
    def _curves(self) -> Floats:
        """A decode step's time over that with no rung, [options + 1, rungs + 1]."""
        found = np.zeros((len(self.climbs), self.num_rungs + 1))
        for (option, _), ladder in self._ladders.items():
            times = ladder.times_ps[2:4, : self.num_rungs + 1].sum(axis=0)
            found[option] = np.append(ladder.none_ps, times[1:]) / max(1, ladder.none_ps)
        return found

    @cached_property
    def _asked(self) -> Ints:
        """Rungs that each layer must have, [options + 1]; 0 where any number will do."""
        return np.asarray(self._fill("asked").max(axis=1))

    @cached_property
    def _gpu_bytes(self) -> Ints:
        """Bytes on the GPU for parts, [options + 1, kinds]."""
        return self._fill("gpu_bytes")

    @cached_property
    def shared_bytes(self) -> Ints:
        """Bytes on the GPU for parts, once for all layers, [options + 1].

        They are those of all kinds of layers: a larger rule of an option never frees less.
        """
        return np.asarray(self._gpu_bytes.max(axis=1))

    @cached_property
    def _part_columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Parts, their copies, and both times, which have a column for each setting."""
        of_settings = len(self.space.settings)
        whole = self._fill("num_parts"), self._fill("copy_ps")
        return *whole, *(self._fill(name, of_settings) for name in ("moved_ps", "part_ps"))

    def parts_ps(self, option: Ints, counts: Ints) -> Ints:
        """Picoseconds of the copies of parts of so many layers of each kind, [rules].

        None is counted where a prompt finds all parts in their slots.
        """
        num_parts, copy_ps = (each[option] for each in self._part_columns[:2])
        copied = (counts * num_parts * copy_ps).sum(axis=1)
        return np.where((counts * num_parts).sum(axis=1) > PART_SLOTS, copied, 0)

    def curve(self, option: Ints, share: Floats) -> Floats:
        """A decode step's time over that with no rung, with a share of all rungs."""
        rungs, row = np.clip(share, 0, 1) * self.num_rungs, np.arange(len(option))
        below, curves = np.floor(rungs).astype(np.int64), self._curves[option]
        part, above = rungs - below, np.minimum(below + 1, self.num_rungs)
        curve: Floats = (1 - part) * curves[row, below] + part * curves[row, above]
        return curve

    def spend(
        self, options: tuple[Ints, Ints], takes: tuple[Ints, Ints], spare: Ints
    ) -> tuple[NDArray[np.bool_], Own | None]:
        """Spend the bytes that candidates leave on what their rules' numbers take.

        ``options`` and ``takes`` are of the first rule and of the second: which layers it takes, 1
        for each. Returns whether the bytes do, [candidates]; without numbers they always do.
        """
        if not self._has_own.any():
            return np.ones(len(spare), dtype=bool), None
        is_first, is_second = (self._has_own[each] for each in options)
        option = np.select((is_first, is_second), options, NO_RULE)
        taken = np.where(is_first[:, None], takes[0], is_second[:, None] * takes[1])
        kinds = np.array(self.space.kind_of)
        shared = (taken * self._gpu_bytes[option][:, kinds]).max(axis=1)
        rungs = self._climb(option, taken, spare)
        fits = (spare >= shared) & (rungs.any(axis=1) | ~self.climbs[option])
        return fits, Own(option, taken, rungs)

    def _climb(self, option: Ints, takes: Ints, spare: Ints) -> Ints:
        """Spend spare bytes on rungs; returns those of each layer, [candidates, layers].

        All layers have as many, the first ones one more. All have 0 where fewer bytes are spare
        than one rung of each layer takes, or than were asked for.
        """
        kinds = np.array(self.space.kind_of)
        of_layer = takes * self.rung_bytes[option][:, kinds]
        takes = (of_layer > 0).astype(np.int64)
        fixed = (takes * self._fixed_bytes[option][:, kinds]).sum(axis=1)
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

    def add(
        self, prompt: PassTable, step: PassTable, setting: Ints, own: Own
    ) -> tuple[PassTable, PassTable]:
        """Add what candidates' numbers take to the times of both phases."""
        at = own.option[:, None], np.array(self.space.kind_of)
        if self.num_rungs:
            more = [each[(*at, own.rungs)] for each in self._times_ps]
            waiting = np.where(step.streams.any(axis=1, keepdims=True), more[4], more[3])
            times = prompt.compute_ps + more[1], prompt.read_ps + more[0]
            prompt = replace(prompt, compute_ps=times[0], read_ps=times[1])
            times = step.compute_ps + waiting, step.read_ps + more[2]
            step = replace(step, compute_ps=times[0], read_ps=times[1])
        num_parts, copy_ps, moved_ps, part_ps = self._part_columns
        num_parts = own.takes * num_parts[at]
        if num_parts.any():
            of_setting = *at, setting[:, None]
            moved = own.takes * moved_ps[of_setting]
            parts = PartTable(num_parts, part_ps[of_setting], copy_ps[at])
            prompt = replace(prompt, compute_ps=prompt.compute_ps - moved, parts=parts)
        return prompt, step
