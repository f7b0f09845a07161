"""Low estimates of plans' times, by arithmetic on what each of their rules takes alone.

A pass takes as long as its compute, resident and reading in place, or as the link if that takes
longer. The link takes all copies and the same reading. The costs of rules add up, but for what the
ring spares, of which the most is deducted. With one slot, copies and the layers that stream take
turns. If the ring runs dry, a pass takes longer: ``Prices`` has the exact times.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.planner.aims import Floats
from offplan.planner.candidates import NO_RULE, Ints
from offplan.planner.classes import group_patterns
from offplan.planner.prices import Prices
from offplan.planner.space import Space


class Loads(NamedTuple):
    """The costs of rules: an array of each, all layers of a rule together.

    A phase's columns are picoseconds but for ``turns``, the number of layers that stream.
    """

    unit_bytes: Floats
    """Bytes off the GPU, less those that the rule's own numbers take there at least."""
    slab_bytes: Floats
    """Bytes on the host."""
    prompt_copied: Floats
    """Copies, without what each takes beside its bytes."""
    prompt_copy: Floats
    """The largest copy of one layer."""
    prompt_read: Floats
    """Reading in place."""
    step_copied: Floats
    step_copy: Floats
    step_read: Floats
    step_spared: Floats
    """Reading of one layer that a slot spares decode, at most: what prefill left there."""
    step_cores: Floats
    """Waiting for the host's cores, which copies hide."""
    cores_spared: Floats
    """Part of that wait that a slot spares decode of one layer, at most."""
    entries_bytes: Floats
    """Bytes of the largest caches."""
    none_ps: Floats
    """Time of a step without caches."""
    prompt_beside: Floats
    """Copies beside whatever computes."""
    slot_bytes: Floats
    """The largest span of a layer in either phase."""
    prompt_turns: Floats
    prompt_compute: Floats
    """Compute of the layers that stream."""
    step_turns: Floats
    step_compute: Floats
    with_curve: Floats
    """The option that has caches; NO_RULE for none."""

    def with_second(self, other: "Loads") -> "Loads":
        """Return what two rules of each plan take together: layers that stream are shared."""
        shared = Loads._fields.index("slot_bytes")
        columns = list(zip(self, other, strict=True))
        added = [one + two for one, two in columns[:shared]]
        return Loads(*added, *(np.maximum(one, two) for one, two in columns[shared:]))


_OPTION = 2.0**50
"""More bytes than any rule takes: sorts rules by option first."""


@dataclass(frozen=True)
class Rules:
    """The rules of a space that differ in memory: an option in a group of patterns.

    They are sorted by option, then by the bytes that they take off the GPU. After the last one,
    where NO_RULE points, is one that takes nothing.
    """

    option: Ints
    """The option of each rule, by number."""
    loads: Loads
    """Columns of shape [settings, rules]."""
    patterns: Ints
    """The patterns of all rules, by number: of one rule those that take the same memory, the
    smallest groups first."""
    num_patterns: Ints
    """Number of patterns of each rule."""
    off_gpu_bytes: Ints
    """Bytes that each rule takes off the GPU, all but the last."""
    shared_bytes: Ints
    """Bytes of that which the own numbers of an option take there, [options + 1, settings]."""

    @cached_property
    def first_pattern(self) -> Ints:
        """Number of the first pattern of each rule."""
        return np.cumsum(self.num_patterns) - self.num_patterns

    @cached_property
    def _starts(self) -> Ints:
        """The first rule of each option."""
        return np.searchsorted(self.option[:-1], np.arange(self.option.max() + 1))

    @cached_property
    def ends(self) -> Ints:
        """The rule after the last one of each option."""
        return np.append(self._starts[1:], len(self.option) - 1)

    @cached_property
    def least_slot(self) -> Floats:
        """Bytes of the smallest slot that a rule of each option asks for."""
        return np.minimum.reduceat(self.loads.slot_bytes[0, :-1], self._starts)

    @cached_property
    def least_slabs(self) -> Floats:
        """Bytes of slabs that each rule takes at least, or one behind it of the same option."""
        least: Floats = self.loads.slab_bytes[0].copy()
        for start, end in zip(self._starts, self.ends, strict=True):
            least[start:end] = np.minimum.accumulate(least[start:end][::-1])[::-1]
        return least

    def find(self, setting: Ints, least_bytes: Floats) -> Ints:
        """Find of each option the smallest rule that takes so many bytes, [rows, options].

        It is the one after the option's last where none does.
        """
        options = np.arange(len(self._starts))
        keys = _OPTION * self.option[:-1] + self.off_gpu_bytes
        wanted = least_bytes + self.shared_bytes[options].T[setting]
        return np.searchsorted(keys, _OPTION * options + np.minimum(wanted, _OPTION))


def list_rules(space: Space, prices: Prices) -> Rules:
    """List the rules of a space, with what they take."""
    kinds = range(len(space.units))
    numbers = np.array(
        [[prices.number(k, (o,)) for k in kinds] for o in range(len(prices.options))]
    )
    sizes = prices.contents.unit_bytes[numbers]
    found = [
        (number, group)
        for number, of_kind in enumerate(sizes)
        for group in sorted(
            group_patterns(space.kind_of, frozenset(np.flatnonzero(of_kind).tolist())),
            key=lambda group: int(np.dot(group.counts, of_kind)),
        )
    ]
    option = np.array([number for number, _ in found])
    counts = np.array([group.counts for _, group in found])
    loads = _sum_up(space, prices, option, numbers, counts)
    patterns = [*(group.patterns for _, group in found), (NO_RULE,)]
    return Rules(
        np.append(option, NO_RULE),
        loads,
        np.concatenate(patterns),
        np.array([len(each) for each in patterns]),
        (counts * sizes[option]).sum(axis=1),
        prices.numbers.shared_bytes,
    )


def _sum_up(space: Space, prices: Prices, option: Ints, numbers: Ints, counts: Ints) -> Loads:
    """Add up contents, [options, kinds] by number, of so many layers of each kind."""
    layers, own, example = numbers[option], prices.numbers, list(space.first_of)
    contents = prices.contents

    def total(each: Any) -> NDArray[Any]:
        return np.asarray((each * counts).sum(axis=-1))

    def most(each: Any) -> NDArray[Any]:
        return np.asarray(np.where(counts > 0, each, 0).max(axis=-1))

    prompt_bytes, step_bytes = contents.prompt_bytes[layers], contents.step_bytes[layers]
    prompt_ps, step_ps = contents.prompt_copy_ps[layers], contents.step_copy_ps[layers]
    step_read = contents.step_read_ps[layers]
    streams, streams_again = prompt_bytes > 0, step_bytes > 0
    columns = Loads(
        unit_bytes=np.maximum(0, total(contents.unit_bytes[layers]) - own.shared_bytes[option].T),
        slab_bytes=total(contents.slab_bytes[layers]),
        prompt_copied=total(prompt_ps - space.start_ps * streams),
        prompt_copy=most(prompt_ps),
        prompt_read=np.array([total(each[layers]) for each in contents.prompt_read_ps.T]),
        step_copied=total(step_ps - space.start_ps * streams_again),
        step_copy=most(step_ps),
        step_read=total(step_read),
        step_spared=most(step_read * streams),
        step_cores=total(contents.step_cores_ps[layers]),
        cores_spared=most(contents.step_cores_ps[layers] * streams),
        entries_bytes=total(own.num_sizes * own.cost_curves.entry_bytes[option]),
        none_ps=total(own.cost_curves.none_ps[option]),
        prompt_beside=own.pieces_ps(option, counts),
        slot_bytes=most(np.maximum(prompt_bytes, step_bytes)),
        prompt_turns=total(streams),
        prompt_compute=np.array([total(streams * each[example]) for each in space.table.layer_ps]),
        step_turns=total(streams_again),
        step_compute=total(streams_again * np.array(space.decode.layer_ps)[example]),
        with_curve=np.where(own.has_curve[option], option, NO_RULE),
    )
    shape = len(space.settings), len(counts) + 1
    padded = (np.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, 1)]) for each in columns)
    return Loads(*(np.broadcast_to(each.astype(np.float64), shape) for each in padded))


def estimate(
    prices: Prices, loads: Loads, setting: Ints, num_slots: Ints, spare: Floats | None = None
) -> tuple[Floats, Floats]:
    """Estimate the picoseconds of each plan's prompt and decode step.

    ``spare`` are the bytes that each has left for caches.

    If decode streams, it has left as many of a prompt's copies as there are slots. Otherwise the
    layers that share a slot with none are not copied again: of n layers over K slots 2 K - n. That
    holds for decode's own copies as well, and up to K layers are never copied at all. If decode
    streams nothing, it finds in each slot what prefill left there.
    """
    space, own = prices.space, prices.numbers
    table, engine = space.table, space.stage.pass_rules
    owners, owners_again = (
        np.maximum(0, 2 * num_slots - turns) for turns in (loads.prompt_turns, loads.step_turns)
    )
    found = np.where(loads.step_turns > 0, num_slots, owners)
    copied = loads.prompt_copied + space.start_ps * loads.prompt_turns
    copied = np.maximum(0, copied - found * loads.prompt_copy)
    every_again = loads.step_copied + space.start_ps * loads.step_turns
    copied_again = np.maximum(0, every_again - owners_again * loads.step_copy)
    copied_again = np.where(loads.step_turns > num_slots, copied_again, 0)
    kept = np.where(loads.step_turns > 0, 0, num_slots)
    read = np.maximum(0, loads.step_read - kept * loads.step_spared)
    if spare is not None and own.num_sizes:
        share = spare / np.maximum(1, loads.entries_bytes)
        read = read + loads.none_ps * own.curve(loads.with_curve.astype(int), share)
    resident_ps, row_ps = table.resident_ps[setting], table.row_ps[setting]
    by_cores = np.maximum(0, loads.step_cores - kept * loads.cores_spared)
    in_turn = num_slots == 1
    step_ps: Floats
    if engine is not None:  # a prompt's chunks stream each for itself
        copied = table.num_chunks[setting] * copied
        if engine.beside_percent is None:  # a step's copies stall
            step_ps = copied_again + resident_ps[:, 1]
        else:  # they all end before what lies outside the layers begins
            copying = every_again + in_turn * loads.step_compute + space.decode.behind_ps
            step_ps = np.maximum((every_again > 0) * copying, resident_ps[:, 1])
    else:
        slowly = np.where(copied_again > 0, (space.slowdown - 1) * read, 0)
        step_ps = copied_again + (in_turn & (copied_again > 0)) * loads.step_compute
        step_ps = np.maximum(resident_ps[:, 1] + slowly + by_cores, step_ps)
    copied = np.maximum(copied + in_turn * loads.prompt_compute, copied + loads.prompt_beside)
    prompt_ps = copied + table.outside_ps[setting]
    prompt_ps = np.maximum(resident_ps[:, 0], prompt_ps) + loads.prompt_read
    return prompt_ps + row_ps[:, 0], step_ps + read + row_ps[:, 1]


def most_rounded_ps(space: Space) -> int:
    """Picoseconds by which an estimate may be more than what it is of, as rounding makes it.

    Rounded are picoseconds of each layer, and bytes read in place.
    """
    most_chunks = int(space.table.num_chunks.max())
    return len(space.kind_of) * (4 + most_chunks * space.reading_ps(3))
