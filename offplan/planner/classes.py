"""Segment classes, priced once for a problem: the sets of layers that differ in what they cost.

A set of layers is known by how many layers of each kind it has, its signature: that alone decides
its memory and its bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul
from typing import NamedTuple

from offplan.placement import Unit
from offplan.planner.patterns import Pattern, distinct_patterns, group_patterns
from offplan.planner.problem import KindCosts, Problem, kind_costs
from offplan.planner.segments import SegmentClass, segment_classes

Signature = tuple[int, ...]
"""How many layers of each kind."""


class Totals(NamedTuple):
    """Sums of KindCosts over the layers of a signature."""

    num_layers: int
    unit_bytes: int
    slab_bytes: int
    slot_bytes: int
    copy_ps: int
    slowest_copy_ps: int
    decode_uva_bytes: int
    decode_uva_ps: int
    most_uva_bytes: int
    """Of one layer."""
    slowest_uva_ps: int
    decode_compute_ps: int
    """Of the layers with something offloaded."""
    prefill_uva_bytes: tuple[int, ...]
    prefill_uva_ps: tuple[int, ...]
    prefill_compute_ps: tuple[int, ...]


@dataclass(frozen=True)
class PricedClass:
    """What rules of one segment class can take, and what it costs."""

    segment_class: SegmentClass
    units: tuple[tuple[Unit, ...], ...]
    """Of a layer of each kind, those that it takes."""
    costs: tuple[KindCosts, ...]
    """Of each kind of layer; zeros where it takes nothing."""
    groups: tuple[tuple[Totals, tuple[Pattern, ...]], ...]
    """Of each signature, with the patterns that have it."""


def price_classes(problem: Problem) -> tuple[PricedClass, ...]:
    """Price all classes of a problem's model."""
    return tuple(_price(problem, each) for each in segment_classes(problem.model))


def _price(problem: Problem, segment_class: SegmentClass) -> PricedClass:
    units = tuple(
        tuple(unit for unit in of_kind if segment_class.takes(unit))
        for of_kind in problem.units_of_kind
    )
    costs = kind_costs(problem, units)
    having = tuple(
        layers if kind.unit_bytes else 0
        for layers, kind in zip(problem.layers_of_kind, costs, strict=True)
    )
    groups = tuple(
        (_sum_up(signature, costs), members)
        for signature, members in _by_signature(len(problem.model.layers), having)
    )
    return PricedClass(segment_class, units, costs, groups)


@cache
def _by_signature(
    num_layers: int, having: tuple[int, ...]
) -> tuple[tuple[Signature, tuple[Pattern, ...]], ...]:
    """Group the patterns that differ by how many layers of each kind they take.

    ``having`` are the layers of each kind, as bits; none of a kind that has nothing to take.
    """
    groups: dict[Signature, list[Pattern]] = {}
    for pattern in distinct_patterns(group_patterns(num_layers), sum(having)):
        signature = tuple((pattern.layers & layers).bit_count() for layers in having)
        groups.setdefault(signature, []).append(pattern)
    return tuple((signature, tuple(members)) for signature, members in groups.items())


def _sum_up(signature: Signature, costs: Sequence[KindCosts]) -> Totals:
    """Add up what the layers of a signature cost."""
    counts = [count for count in signature if count]
    present = [kind for count, kind in zip(signature, costs, strict=True) if count]

    def total(values: Iterable[int]) -> int:
        return sum(map(mul, counts, values))

    def totals(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(total(column) for column in zip(*rows, strict=True))

    return Totals(
        num_layers=sum(signature),
        unit_bytes=total(k.unit_bytes for k in present),
        slab_bytes=total(k.slab_bytes for k in present),
        slot_bytes=max(k.slab_bytes for k in present),
        copy_ps=total(k.copy_ps for k in present),
        slowest_copy_ps=max(k.copy_ps for k in present),
        decode_uva_bytes=total(k.decode_uva_bytes for k in present),
        decode_uva_ps=total(k.decode_uva_ps for k in present),
        most_uva_bytes=max(k.decode_uva_bytes for k in present),
        slowest_uva_ps=max(k.decode_uva_ps for k in present),
        decode_compute_ps=total(k.decode_compute_ps for k in present),
        prefill_uva_bytes=totals(k.prefill_uva_bytes for k in present),
        prefill_uva_ps=totals(k.prefill_uva_ps for k in present),
        prefill_compute_ps=totals(k.prefill_compute_ps for k in present),
    )
