"""The numbers of all options' rules, in arrays: what they take of the GPU, and what they cost.

``planner.option`` says what each option has: a cost curve, pieces, or neither. The row
after the last option, and that of an option without either, has nothing but zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offplan.costs.steady import PassTable, PieceTable
from offplan.placement import PIECE_SLOTS
from offplan.planner.aims import Floats
from offplan.planner.candidates import NO_RULE, Ints
from offplan.planner.option import CostCurve, Option, Pieces
from offplan.planner.space import Space

Each = TypeVar("Each", CostCurve, Pieces)


class Own(NamedTuple):
    """The numbers of candidates, of which one rule at most has any."""

    option: Ints
    """The rule's option; NO_RULE where none has numbers, [candidates]."""
    takes: Ints
    """1 for the layers that the rule takes, [candidates, layers]."""
    cache_sizes: Ints
    """Entries that each layer's cache has memory for, [candidates, layers]."""


@dataclass(frozen=True)
class Numbers:
    """Ladders and pieces of all options, by option and kind of layer."""

    space: Space
    options: tuple[Option, ...]

    def _stack(self, of: type[Each], ask: Callable[[Option, int], Each | None]) -> Each:
        """Stack a record's fields, [options + 1, kinds, ...]: zeros where an option has none."""
        kinds = range(len(self.space.units))
        found = {(n, k): ask(option, k) for n, option in enumerate(self.options) for k in kinds}
        every = {at: each for at, each in found.items() if each is not None}
        columns = []
        for number in range(len(of._fields)):
            shape: tuple[int, ...] = next((np.shape(each[number]) for each in every.values()), ())
            column = np.zeros((len(self.options) + 1, len(kinds), *shape), dtype=np.int64)
            for at, each in every.items():
                column[at] = each[number]
            columns.append(column)
        return of(*columns)

    @cached_property
    def cost_curves(self) -> CostCurve:
        """The cost curves: arrays of shape [options + 1, kinds], and ``times_ps`` of more."""
        return self._stack(CostCurve, lambda option, kind: option.cost_curve(self.space, kind))

    @cached_property
    def _pieces(self) -> Pieces:
        """The pieces: arrays of shape [options + 1, kinds], and times of [..., settings]."""
        return self._stack(Pieces, lambda option, kind: option.pieces(self.space, kind))

    @cached_property
    def has_curve(self) -> NDArray[np.bool_]:
        """True if an option has cost curves, [options + 1]."""
        return np.array([*(option.has_curve for option in self.options), False])

    @cached_property
    def num_sizes(self) -> int:
        """Entries of the largest cache on every cost curve; 0 where there is none."""
        return int(self.has_curve.any()) and self.cost_curves.times_ps.shape[-1] - 1

    @cached_property
    def _times_ps(self) -> list[Ints]:
        """The times of cost curves one by one, [options + 1, kinds, num_sizes + 1] each."""
        return [*np.ascontiguousarray(self.cost_curves.times_ps.transpose(2, 0, 1, 3))]

    @cached_property
    def shared_bytes(self) -> Ints:
        """Bytes on the GPU for pieces at least, once for all layers, [options + 1, settings].

        They are those of all kinds of layers: a larger rule of an option never frees less. Where
        pieces of all layers spare more than they take they are negative.
        """
        shape, pieces = (len(self.has_curve), len(self.space.settings)), self._pieces
        if not self._has_pieces:
            return np.zeros(shape, dtype=np.int64)
        taken = pieces.gpu_bytes - pieces.spared_bytes
        most = taken.max(axis=1, initial=taken.min(), where=pieces.num_pieces[..., None] > 0)
        return np.where(self._in_pieces[:, None], most, 0)

    @cached_property
    def _in_pieces(self) -> NDArray[np.bool_]:
        """True if an option has pieces of any layer, [options + 1]."""
        return np.asarray(self._pieces.num_pieces.any(axis=1))

    @property
    def _has_pieces(self) -> bool:
        return bool(self._in_pieces.any())

    def pieces_ps(self, option: Ints, counts: Ints) -> Floats:
        """Picoseconds of the copies of pieces of so many layers of each kind, [settings, rules].

        None is counted where a prompt finds all pieces in their slots, and one where its groups do.
        """
        if not self._has_pieces:
            return np.zeros(len(option))
        pieces = Pieces(*(each[option] for each in self._pieces))
        num_pieces = counts * pieces.num_pieces
        crossings = np.where(pieces.num_pieces[..., None] > PIECE_SLOTS, pieces.num_groups, 1)
        copied = ((num_pieces * pieces.copy_ps)[..., None] * crossings).sum(axis=1)
        is_copied = num_pieces.sum(axis=1) > PIECE_SLOTS
        return np.where(is_copied, copied.T, 0).astype(np.float64)

    @cached_property
    def _curves(self) -> Floats:
        """A decode step's time over that with no cache, [options + 1, num_sizes + 1].

        It is that of the last kind of layer that has a cost curve.
        """
        step_ps = self.cost_curves.times_ps[..., 2:4, :].sum(axis=-2)
        step_ps[..., 0] = self.cost_curves.none_ps
        kinds = np.arange(step_ps.shape[1])
        last = np.where(self.cost_curves.entry_bytes > 0, kinds, 0).max(axis=1)
        of_last = step_ps[np.arange(len(last)), last]
        curves: Floats = of_last / np.maximum(1, of_last[:, :1])
        return curves

    def curve(self, option: Ints, share: Floats) -> Floats:
        """A decode step's time over that with no cache, with a share of the largest cache."""
        cache_sizes, curves = np.clip(share, 0, 1) * self.num_sizes, self._curves
        below = np.floor(cache_sizes).astype(np.int64)
        part, above = cache_sizes - below, np.minimum(below + 1, self.num_sizes)
        curve: Floats = (1 - part) * curves[option, below] + part * curves[option, above]
        return curve

    def spend(
        self, setting: Ints, options: tuple[Ints, Ints], takes: tuple[Ints, Ints], spare: Ints
    ) -> tuple[NDArray[np.bool_], Own | None]:
        """Spend the bytes that candidates leave on what their rules' numbers take.

        ``options`` and ``takes`` are of the first rule and of the second: which layers it takes, 1
        for each. Returns True where the bytes suffice, [candidates]. ``spare`` may be negative
        where pieces of all layers spare more than they take.
        """
        has_own = self.has_curve | self._in_pieces
        if not has_own.any():
            return spare >= 0, None
        is_first, is_second = (has_own[each] for each in options)
        option = np.select((is_first, is_second), options, NO_RULE)
        taken = np.where(is_first[:, None], takes[0], is_second[:, None] * takes[1])
        cache_sizes = self._enlarge(option, taken, spare)
        fits = cache_sizes.any(axis=1) | ~self.has_curve[option]
        needed = np.zeros_like(spare)
        if self._has_pieces:
            at = option[:, None], self.space.kinds, setting[:, None]
            gpu_bytes, spared_bytes = self._pieces.gpu_bytes[at], self._pieces.spared_bytes[at]
            takes_all = (taken >= (gpu_bytes > 0)).all(axis=1)
            needed = (taken * gpu_bytes).max(axis=1) - takes_all * spared_bytes.max(axis=1)
        return fits & (spare >= needed), Own(option, taken, cache_sizes)

    def _enlarge(self, option: Ints, takes: Ints, spare: Ints) -> Ints:
        """Spend spare bytes on caches; returns the entries of each layer's, [candidates, layers].

        All layers have as many, the first ones one more. All have 0 where fewer bytes are spare
        than one entry of each layer takes, or than were asked for.
        """
        kinds, cost_curves = self.space.kinds, self.cost_curves
        of_layer = takes * cost_curves.entry_bytes[option][:, kinds]
        takes = (of_layer > 0).astype(np.int64)
        fixed = (takes * cost_curves.fixed_bytes[option][:, kinds]).sum(axis=1)
        largest = np.maximum(1, of_layer.max(axis=1))
        num_layers = takes.sum(axis=1)
        total = np.minimum((spare - fixed) // largest, self.num_sizes * num_layers)
        asked = cost_curves.asked.max(axis=1)[option] * num_layers
        total = np.where(asked > 0, np.where(total >= asked, asked, 0), total)
        total = np.where(total >= num_layers, total, 0)
        each, more = np.divmod(total, np.maximum(1, num_layers))
        is_first = np.cumsum(takes, axis=1) <= more[:, None]
        cache_sizes: Ints = takes * (each[:, None] + is_first)
        return cache_sizes

    def add(
        self, prompt: PassTable, step: PassTable, setting: Ints, own: Own
    ) -> tuple[PassTable, PassTable]:
        """Add what candidates' numbers take to the times of both phases."""
        at = own.option[:, None], self.space.kinds
        if self.num_sizes:
            read, computed, read_again, alone, beside = (
                each[(*at, own.cache_sizes)] for each in self._times_ps
            )
            waiting = np.where(step.streams.any(axis=1, keepdims=True), beside, alone)
            prompt, step = prompt.with_more(read, computed), step.with_more(read_again, waiting)
        pieces = self._pieces
        if self._has_pieces and (num_pieces := own.takes * pieces.num_pieces[at]).any():
            of_setting = *at, setting[:, None]
            groups = np.maximum(1, own.takes * pieces.num_groups[of_setting])
            table = PieceTable(num_pieces, pieces.piece_ps[of_setting], pieces.copy_ps[at], groups)
            moved = own.takes * pieces.moved_ps[of_setting]
            prompt = replace(prompt, compute_ps=prompt.compute_ps - moved, pieces=table)
        return prompt, step
