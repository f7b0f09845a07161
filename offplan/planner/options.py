"""What rules of a segment class can take: the sets of layers that differ in what they cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from offplan.placement import Unit
from offplan.plan import Backend
from offplan.planner.classes import PricedClass, Totals
from offplan.planner.patterns import Pattern
from offplan.planner.problem import KindCosts
from offplan.planner.segments import SegmentClass

Backends = tuple[Backend, Backend]

Turns = tuple[bool, bool]
"""Whether the layers that a rule streams compute in turns with the link, in each phase."""


class Taken(NamedTuple):
    """What one rule of a plan takes."""

    segment_class: SegmentClass
    costs: tuple[KindCosts, ...]
    """Of its class, by kind of layer."""
    totals: Totals
    pattern: Pattern
    backends: Backends


@dataclass(frozen=True)
class Option:
    """A segment class, with those of its sets of layers whose largest slab is the same.

    Where layers differ, a few small ones need a small ring, many a large one: a bound for both
    would be one for neither.
    """

    segment_class: SegmentClass
    units: frozenset[tuple[int, Unit]]
    """What the class takes, with the kind of layer."""
    costs: tuple[KindCosts, ...]
    """Of each kind of layer; zeros where it takes nothing."""
    groups: tuple[tuple[Totals, Pattern], ...]
    """By the bytes they take off the GPU, the least first."""
    _rates: dict[tuple[Backends, Sequence[int], Turns], "Rates"] = field(default_factory=dict)
    _prices: dict[tuple[Backends, Sequence[int], Turns], list["Rates"]] = field(
        default_factory=dict
    )
    _taken: dict[Backends, list[Taken]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes that each group takes off the GPU."""
        return [totals.unit_bytes for totals, _ in self.groups]

    @cached_property
    def layers(self) -> list[int]:
        """The layers of each group, as bits."""
        return [pattern.layers for _, pattern in self.groups]

    @property
    def slot_bytes(self) -> int:
        """The largest slab of each group."""
        return self.groups[0][0].slot_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """The most that a group takes of a layer."""
        return max(kind.unit_bytes for kind in self.present)

    @cached_property
    def present(self) -> list[KindCosts]:
        """Of the kinds that groups may have."""
        return [kind for kind in self.costs if 0 < kind.slab_bytes <= self.slot_bytes]

    def rates(
        self, backends: Backends, settings: Sequence[int], start_ps: int, turns: Turns
    ) -> "Rates":
        """What a byte costs at least; a copy takes ``start_ps`` beside its bytes."""
        key = (backends, settings, turns)
        found = self._rates.get(key)
        if found is None:
            each = [
                (_price(kind, 1, backends, settings, start_ps, turns), kind.unit_bytes)
                for kind in self.present
            ]
            found = self._rates[key] = Rates(
                *(min(rates[i] / unit_bytes for rates, unit_bytes in each) for i in range(4))
            )
        return found

    def prices(
        self, backends: Backends, settings: Sequence[int], start_ps: int, turns: Turns
    ) -> list["Rates"]:
        """What each group costs, the starts of its copies left out: rules may share them."""
        key = (backends, settings, turns)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = [
                _price(totals, totals.num_layers, backends, settings, start_ps, turns)
                for totals, _ in self.groups
            ]
        return found

    def taken(self, backends: Backends) -> list[Taken]:
        """Each of the groups, taken by a rule."""
        found = self._taken.get(backends)
        if found is None:
            found = self._taken[backends] = [
                Taken(self.segment_class, self.costs, *group, backends) for group in self.groups
            ]
        return found


class Rates(NamedTuple):
    """Picoseconds of each kind that a byte costs, or a group."""

    prompt_copy: float
    prompt_read: float
    step_copy: float
    step_read: float


def _price(
    costs: KindCosts | Totals,
    num_layers: int,
    backends: Backends,
    settings: Sequence[int],
    start_ps: int,
    turns: Turns,
) -> Rates:
    def least(of_settings: Sequence[int]) -> int:
        return min(of_settings[setting] for setting in settings)

    copied = costs.copy_ps - num_layers * start_ps
    prompt, step = (backend is Backend.PREFETCH for backend in backends)
    return Rates(
        (copied + (least(costs.prefill_compute_ps) if turns[0] else 0)) if prompt else 0,
        0 if prompt else least(costs.prefill_uva_ps),
        (copied + (costs.decode_compute_ps if turns[1] else 0)) if step else 0,
        0 if step else costs.decode_uva_ps,
    )


def list_options(classes: Iterable[PricedClass]) -> tuple[Option, ...]:
    """List what rules of these classes can take."""
    options = []
    for priced in classes:
        units = frozenset((kind, unit) for kind, units in enumerate(priced.units) for unit in units)
        by_slot: dict[int, list[tuple[Totals, Pattern]]] = {}
        for totals, patterns in priced.groups:
            by_slot.setdefault(totals.slot_bytes, []).append((totals, patterns[0]))
        for groups in by_slot.values():
            ordered = tuple(sorted(groups, key=lambda group: group[0].unit_bytes))
            options.append(Option(priced.segment_class, units, priced.costs, ordered))
    return tuple(options)


def are_disjoint(options: Sequence[Option]) -> bool:
    """Whether their classes have no parameter in common."""
    units = [option.units for option in options]
    return len(frozenset().union(*units)) == sum(map(len, units))


def users_of(streamed: Sequence[Taken]) -> int:
    """Layers of which these rules take something, as bits."""
    users = 0
    for rule in streamed:
        users |= rule.pattern.layers
    return users
