"""Lower bounds of what plans take, by arithmetic on what each of their rules takes alone.

A pass takes at least what compute takes, resident and reading in place, and at least what the link
does, all copies and the same reading. Both add up over rules, but for the start of a copy, which
rules share where they take parts of one layer, and for what the ring spares, of which the most is
deducted. With one slot, copies and the layers that stream take turns: none overlaps another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offplan.planner.aims import Floats
from offplan.planner.patterns import group_patterns
from offplan.planner.prices import Ints, Prices
from offplan.planner.space import Space

ROUNDING_PS = 4
"""Sums of rounded times may exceed the rounded time of the sum by less, slowed down or not."""
ROUNDING_BYTES = 3
"""Sums of rounded bytes of two rules in one layer may exceed the rounded sum by less."""


class Loads(NamedTuple):
    """What rules take: arrays of an entry for each rule, or for each rule of a pair.

    ``copied``, ``read`` and the like are picoseconds, or bytes, all layers of the rule together;
    of copies what each takes beside its bytes is left out.
    """

    unit_bytes: Floats
    """Bytes off the GPU."""
    slab_bytes: Floats
    """Bytes on the host."""
    slot_bytes: Floats
    """The largest span of a layer in either phase."""
    prompt_turns: Floats
    """Layers that stream in prefill."""
    prompt_copied: Floats
    prompt_largest: Floats
    """The largest copy of one layer."""
    step_turns: Floats
    step_copied: Floats
    step_largest: Floats
    step_smallest: Floats
    """The smallest copy of one layer."""
    step_read: Floats
    step_spared: Floats
    """The most that a slot may hold of what decode reads of one layer: what prefill left there."""
    step_compute: Floats
    prompt_read: Floats
    prompt_compute: Floats
    """Compute of the layers that stream; like what prompts read, it depends on the setting."""


_DEDUCTED = [[name in ("prompt_largest", "step_largest", "step_spared")] for name in Loads._fields]


@dataclass(frozen=True)
class LoadTable:
    """The loads of all rules, in all settings."""

    plain: Floats
    """Figures that hold in every setting, [13, rules], in the order of ``Loads``."""
    by_setting: Floats
    """Figures that depend on the setting, [2, settings, rules]."""

    @property
    def columns(self) -> Loads:
        """What every rule takes, in the first setting where that matters."""
        return Loads(*self.plain, *self.by_setting[:, 0])

    def at(self, rows: Ints, setting: Ints) -> Loads:
        """Select rules, each in a setting."""
        return Loads(*self.plain[:, rows], *self.by_setting[:, setting, rows])

    def least_from(self, starts: Ints) -> "LoadTable":
        """Return what no rule from each one on up to the next start takes less than.

        Deductions are the most of any of them.
        """

        def least(figures: Floats) -> Floats:
            parts = np.split(figures[..., ::-1], len(self.plain[0]) - starts[:0:-1], axis=-1)
            return np.concatenate([np.minimum.accumulate(p, -1) for p in parts], -1)[..., ::-1]

        sign = np.where(_DEDUCTED[: len(self.plain)], -1.0, 1.0)
        return LoadTable(sign * least(sign * self.plain), least(self.by_setting))


@dataclass(frozen=True)
class Rules:
    """The rules of a space that differ in what they cost: an option in a group of patterns.

    They are sorted by option, then by the bytes that they take off the GPU.
    """

    option: Ints
    """The option of each rule, by number."""
    patterns: tuple[tuple[int, ...], ...]
    """The patterns that cost the same, by number; the first has the smallest groups."""
    starts: Ints
    """The first rule of each option."""
    times: LoadTable
    """What rules take, in picoseconds."""
    traffic: LoadTable
    """What rules take, in bytes."""

    @cached_property
    def first_pattern(self) -> Ints:
        """The pattern of the smallest groups of each rule, by number."""
        return np.array([numbers[0] for numbers in self.patterns])

    @cached_property
    def ends(self) -> Ints:
        """The rule after the last one of each option."""
        return np.append(self.starts[1:], len(self.option))

    @cached_property
    def least_times(self) -> LoadTable:
        """What no rule of the same option takes less than that takes as many bytes or more."""
        return self.times.least_from(self.starts)


def list_rules(space: Space, prices: Prices) -> Rules:
    """List the rules of a space, with what they take."""
    kinds = range(len(space.units))
    numbers = np.array([[prices.number(k, (o,)) for k in kinds] for o in range(len(space.options))])
    sizes = prices.contents[0].unit_bytes[numbers]
    groups = [
        (number, group)
        for number, of_kind in enumerate(sizes)
        for group in sorted(
            group_patterns(space.kind_of, frozenset(np.flatnonzero(of_kind).tolist())),
            key=lambda group: int(np.dot(group.counts, of_kind)),
        )
    ]
    option = np.array([number for number, _ in groups])
    counts = np.array([group.counts for _, group in groups])
    layers = numbers[option]
    return Rules(
        option,
        tuple(group.patterns for _, group in groups),
        np.searchsorted(option, np.arange(len(sizes))),
        sum_up(space, prices, layers, counts, in_bytes=False),
        sum_up(space, prices, layers, counts, in_bytes=True),
    )


def sum_up(
    space: Space, prices: Prices, layers: Ints, counts: Ints, *, in_bytes: bool
) -> LoadTable:
    """Add up contents, [rules, kinds] by number, of so many layers of each kind."""
    contents, prompt_reads = prices.contents

    def total(column: Ints) -> Floats:
        return np.asarray((column[layers] * counts).sum(axis=-1), np.float64)

    def most(column: Ints) -> Floats:
        return np.asarray(np.where(counts > 0, column[layers], 0).max(axis=-1), np.float64)

    def smallest(column: Ints) -> Floats:
        streams = (counts > 0) & (column[layers] > 0)
        least = np.where(streams, column[layers], np.iinfo(np.int64).max).min(axis=-1)
        return np.asarray(np.where(streams.any(axis=-1), least, 0), np.float64)

    def turns(span_bytes: Ints, each: Ints | int = 1) -> Floats:
        return np.asarray((each * counts * (span_bytes[layers] > 0)).sum(axis=-1), np.float64)

    example = [space.kind_of.index(kind) for kind in range(counts.shape[1])]
    prompt_span, step_span = contents.prompt_bytes, contents.step_bytes
    start_ps = 0 if in_bytes else space.start_ps
    copies, reads = (prompt_span, step_span), contents.step_read_bytes
    if not in_bytes:
        copies = contents.prompt_copy_ps, contents.step_copy_ps
        reads = contents.step_read_ps
    plain = (
        *(total(contents.unit_bytes), total(contents.slab_bytes)),
        most(np.maximum(prompt_span, step_span)),
        *(turns(prompt_span), total(copies[0]) - start_ps * turns(prompt_span), most(copies[0])),
        *(turns(step_span), total(copies[1]) - start_ps * turns(step_span), most(copies[1])),
        smallest(copies[1]),
        *(total(reads), most(np.where(prompt_span > 0, reads, 0))),
        turns(step_span, np.array(space.decode.layer_ps)[example]),
    )
    by_setting = (
        [total(read) for read in prompt_reads[:, int(in_bytes)].T],
        [turns(prompt_span, layer_ps[example]) for layer_ps in space.table.layer_ps],
    )
    return LoadTable(np.array(plain), np.array(by_setting))


class Crossing(NamedTuple):
    """What crosses the link at least, in picoseconds or bytes; an entry for each plan."""

    prompt_copied: Floats
    prompt_read: Floats
    step_copied: Floats
    step_read: Floats


def cross(rules: Sequence[Loads], num_slots: Ints, start: int, more: bool = False) -> Crossing:
    """Add up what the rules of each plan have cross; ``start`` is what each copy takes beside.

    With ``more``, plans that have further rules take no less either.

    Of a prompt's copies decode has left as many as there are slots, where it streams; otherwise the
    layers that share a slot with none are not copied again: of n layers over K slots 2 K - n. That
    holds for decode's own copies as well, and up to K layers are never copied at all. Where decode
    streams nothing, it finds in each slot what prefill left there.
    """
    prompt_turns, step_turns = (
        np.maximum.reduce([getattr(rule, name) for rule in rules])
        for name in ("prompt_turns", "step_turns")
    )
    prompt_owners, step_owners = (
        np.maximum(0, 2 * num_slots - turns) for turns in (prompt_turns, step_turns)
    )
    found = np.where((step_turns > 0) | more, num_slots, prompt_owners)
    copied = sum(rule.prompt_copied for rule in rules) + start * prompt_turns
    copied = copied - found * sum(rule.prompt_largest for rule in rules)
    copied_again = sum(rule.step_copied for rule in rules) + start * step_turns
    copied_again = copied_again - step_owners * sum(rule.step_largest for rule in rules)
    kept = np.where((step_turns > 0) & (not more), 0, num_slots)
    return Crossing(
        prompt_copied=np.maximum(0, copied),
        prompt_read=np.add.reduce([rule.prompt_read for rule in rules]),
        step_copied=np.where(step_turns > num_slots, np.maximum(0, copied_again), 0),
        step_read=np.add.reduce(
            [np.maximum(0, rule.step_read - kept * rule.step_spared) for rule in rules]
        ),
    )


def bound_times(
    space: Space, rules: Sequence[Loads], setting: Ints, num_slots: Ints, more: bool = False
) -> tuple[Floats, Floats]:
    """Bound the picoseconds of each plan's prompt and decode step; ``more`` is as in ``cross``."""
    crossing = cross(rules, num_slots, space.start_ps, more)
    prompt_copied, prompt_read, step_copied, step_read = crossing
    table, row_ps = space.table, space.table.row_ps[setting]
    if len(rules) > 1 or more:  # what is rounded once for a plan was rounded for each rule
        byte_ps, layers = space.reading_ps(ROUNDING_BYTES, space.slowest), len(space.kind_of)
        slack_ps = layers * (table.num_chunks[setting] * byte_ps + ROUNDING_PS)
        prompt_read = np.maximum(0, prompt_read - slack_ps)
        step_read = np.maximum(0, step_read - layers * (byte_ps + ROUNDING_PS))
        prompt_copied = np.maximum(0, prompt_copied - layers * ROUNDING_PS)
        step_copied = np.maximum(0, step_copied - layers * ROUNDING_PS)
    engine = space.stage.runner.pass_rules
    if engine is not None:  # a prompt's chunks stream each for itself, a step's copies stall
        prompt_copied = table.num_chunks[setting] * prompt_copied
    copies, in_turns = step_copied > 0, num_slots == 1
    prompt_turns = np.maximum.reduce([rule.prompt_compute for rule in rules]) * in_turns
    step_turns = np.maximum.reduce([rule.step_compute for rule in rules]) * (in_turns & copies)
    resident_ps, outside_ps = table.resident_ps[setting], table.outside_ps[setting]
    prompt_ps = np.maximum(resident_ps[:, 0], prompt_copied + prompt_turns + outside_ps)
    slowly_ps = np.where(copies, np.floor((space.slowdown - 1) * step_read), 0)
    step_ps = np.maximum(resident_ps[:, 1] + slowly_ps, step_copied + step_turns)
    if engine is not None:
        step_ps = resident_ps[:, 1] + step_copied
        if engine.copies_first_again:  # at least those of as many of the smallest
            (rule,) = rules  # no engine's plan has more
            ahead = np.minimum(engine.slots_ahead(num_slots), rule.step_turns)
            step_ps = step_ps + ahead * rule.step_smallest
    return prompt_ps + prompt_read + row_ps[:, 0], step_ps + step_read + row_ps[:, 1]
