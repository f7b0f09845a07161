"""The space that the search goes over, priced by arithmetic: memory, and a proven lower bound.

No placement or schedule is built here. A set of layers is known by how many layers of each kind it
has, its signature: that alone decides its memory and its bound.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from offplan.placement import Unit
from offplan.plan import Backend
from offplan.planner.families import Family, Shortfall
from offplan.planner.patterns import Pattern, distinct_patterns, group_patterns
from offplan.planner.problem import KindCosts, Problem, kind_costs, slab_bytes
from offplan.planner.segments import SegmentClass, segment_classes

PREFETCH_STEPS = (1, 2, 3, 4)
"""Ring sizes tried."""

BACKENDS = (
    (Backend.PREFETCH, Backend.PREFETCH),
    (Backend.PREFETCH, Backend.UVA),
    (Backend.UVA, Backend.UVA),
)
"""Prefill's and decode's backend. Decode by prefetch with prefill in place is not tried: a prompt's
rows are never fewer than a step's, so reading in place never suits the prompt better."""


def list_backends(problem: Problem) -> tuple[tuple[Backend, Backend], ...]:
    """BACKENDS, without those that the store does not serve, or an engine has no flag for."""
    kernels_reach = problem.machine.store == "host"
    return tuple(
        (prefill, decode)
        for prefill, decode in BACKENDS
        if (kernels_reach or Backend.UVA not in (prefill, decode))
        and (problem.restriction is None or prefill is decode)
    )


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


def list_families(problem: Problem) -> tuple[list[Family], Shortfall]:
    """List all families that fit, and what those that do not lack."""
    shortfall = Shortfall()
    families = list(_resident_families(problem, shortfall))
    patterns = group_patterns(len(problem.model.layers))
    for segment_class in segment_classes(problem.model):
        costs = kind_costs(problem, segment_class)
        families += _max_bytes_families(problem, segment_class, shortfall)
        for signature, members in by_signature(problem, costs, patterns).items():
            totals = sum_up(signature, costs)
            for prefill, decode in list_backends(problem):
                uses_ring = Backend.PREFETCH in (prefill, decode)
                for step in PREFETCH_STEPS if uses_ring else (0,):
                    if uses_ring and totals.num_layers <= step:
                        continue  # every layer would own a slot: resident in all but name
                    families += _pattern_families(
                        problem, segment_class, totals, members, prefill, decode, step, shortfall
                    )
    return families, shortfall


def _resident_families(problem: Problem, shortfall: Shortfall) -> Iterator[Family]:
    for setting in problem.settings:
        if not shortfall.note(setting.lacking_bytes, problem.host_lack(0, setting)):
            continue
        yield Family(
            prefill_ps=setting.prefill.resident_ps + setting.row_ps[0],
            decode_ps=problem.decode.resident_ps + setting.row_ps[1],
            link_bytes=problem.objective(*setting.row_bytes),
            prefetch_step=1,
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            num_segments=0,
            segments=(),
            prefill=Backend.UVA,
            decode=Backend.UVA,
            max_bytes=0,
            patterns=(),
        )


def by_signature(
    problem: Problem, costs: Sequence[KindCosts], patterns: tuple[Pattern, ...]
) -> dict[Signature, tuple[Pattern, ...]]:
    """Group the patterns that differ for this class by how many layers of each kind they take."""
    having = [
        layers if kind.unit_bytes else 0
        for layers, kind in zip(problem.layers_of_kind, costs, strict=True)
    ]
    groups: dict[Signature, list[Pattern]] = {}
    for pattern in distinct_patterns(patterns, sum(having)):
        signature = tuple((pattern.layers & layers).bit_count() for layers in having)
        groups.setdefault(signature, []).append(pattern)
    return {signature: tuple(members) for signature, members in groups.items()}


def sum_up(signature: Signature, costs: Sequence[KindCosts]) -> Totals:
    """Add up what the layers of a signature cost."""
    present = [(count, kind) for count, kind in zip(signature, costs, strict=True) if count]

    def total(values: Iterable[int]) -> int:
        return sum(n * value for (n, _), value in zip(present, values, strict=True))

    def totals(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(total(column) for column in zip(*rows, strict=True))

    return Totals(
        num_layers=sum(signature),
        unit_bytes=total(k.unit_bytes for _, k in present),
        slab_bytes=total(k.slab_bytes for _, k in present),
        slot_bytes=max(k.slab_bytes for _, k in present),
        copy_ps=total(k.copy_ps for _, k in present),
        slowest_copy_ps=max(k.copy_ps for _, k in present),
        decode_uva_bytes=total(k.decode_uva_bytes for _, k in present),
        decode_uva_ps=total(k.decode_uva_ps for _, k in present),
        most_uva_bytes=max(k.decode_uva_bytes for _, k in present),
        slowest_uva_ps=max(k.decode_uva_ps for _, k in present),
        decode_compute_ps=total(k.decode_compute_ps for _, k in present),
        prefill_uva_bytes=totals(k.prefill_uva_bytes for _, k in present),
        prefill_uva_ps=totals(k.prefill_uva_ps for _, k in present),
        prefill_compute_ps=totals(k.prefill_compute_ps for _, k in present),
    )


def _pattern_families(
    problem: Problem,
    segment_class: SegmentClass,
    totals: Totals,
    members: tuple[Pattern, ...],
    prefill: Backend,
    decode: Backend,
    num_slots: int,
    shortfall: Shortfall,
) -> Iterator[Family]:
    """Price one signature with one ring and backend, for each setting."""
    saved_bytes = totals.unit_bytes - num_slots * totals.slot_bytes
    if decode is Backend.UVA:
        # as many layers as there are slots find their slab where prefill left it
        spared_ps = num_slots * totals.slowest_uva_ps
        decode_ps = problem.decode.resident_ps + max(0, totals.decode_uva_ps - spared_ps)
        decode_bytes = max(0, totals.decode_uva_bytes - num_slots * totals.most_uva_bytes)
    else:
        decode_ps, decode_bytes = _ring_bound(
            totals, num_slots, 0, problem.decode.resident_ps, totals.decode_compute_ps
        )
    for number, setting in enumerate(problem.settings):
        host_lack = problem.host_lack(totals.slab_bytes, setting)
        if not shortfall.note(setting.lacking_bytes - saved_bytes, host_lack):
            continue
        if prefill is Backend.UVA:
            prefill_ps = setting.prefill.resident_ps + totals.prefill_uva_ps[number]
            prefill_bytes = totals.prefill_uva_bytes[number]
        else:
            prefill_ps, prefill_bytes = _ring_bound(
                totals,
                num_slots,
                num_slots if decode is Backend.PREFETCH else 0,
                setting.prefill.resident_ps,
                totals.prefill_compute_ps[number],
            )
        yield Family(
            prefill_ps=prefill_ps + setting.row_ps[0],
            decode_ps=decode_ps + setting.row_ps[1],
            link_bytes=problem.objective(
                prefill_bytes + setting.row_bytes[0], decode_bytes + setting.row_bytes[1]
            ),
            prefetch_step=max(1, num_slots),
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            num_segments=len(segment_class.segments),
            segments=segment_class.segments,
            prefill=prefill,
            decode=decode,
            max_bytes=0,
            patterns=members,
        )


def _ring_bound(
    totals: Totals,
    num_slots: int,
    num_warm: int,
    compute_ps: int,
    streamed_compute_ps: int,
) -> tuple[int, int]:
    """Least time and bytes of a pass that streams through a ring.

    Of n layers over K slots those whose slot nobody shares are not copied again: 2 K - n, where
    that is positive. Of the slots ``num_warm`` are found full: decode refills them for the prompt
    that follows, where it streams at all. With one slot, copies and the layers
    that stream take turns: none overlaps another.
    """
    owners = max(0, 2 * num_slots - totals.num_layers)
    skipped = max(owners, num_warm)
    copied_ps = max(0, totals.copy_ps - skipped * totals.slowest_copy_ps)
    copied_bytes = max(0, totals.slab_bytes - skipped * totals.slot_bytes)
    if num_slots == 1:
        copied_ps += streamed_compute_ps
    return max(compute_ps, copied_ps), copied_bytes


def _max_bytes_families(
    problem: Problem, segment_class: SegmentClass, shortfall: Shortfall
) -> Iterator[Family]:
    """Read the first parameters in place, as few as fit: for each setting one candidate.

    More of them would only move more bytes, so no other ``max_bytes`` can be better.
    """
    taken = [
        (layer, unit)
        for layer, units in enumerate(problem.units)
        for unit in units
        if segment_class.takes(unit)
    ]
    sums = list(accumulate(unit.nbytes for _, unit in taken))
    for setting in problem.settings:
        needed = setting.lacking_bytes
        if needed <= 0 or problem.machine.store == "peer":
            continue
        last = min(bisect_left(sums, needed), len(sums) - 1)
        max_bytes = _roundest(sums[last - 1] if last else 0, sums[last])
        if problem.restriction is not None:
            multiple = problem.restriction.max_bytes_unit
            max_bytes = -(-max_bytes // multiple) * multiple
            last = min(bisect_left(sums, max_bytes), len(sums) - 1)
        by_layer: dict[int, list[Unit]] = {}
        for layer, unit in taken[: last + 1]:
            by_layer.setdefault(layer, []).append(unit)
        host_bytes = sum(slab_bytes(units) for units in by_layer.values())
        if not shortfall.note(needed - sums[last], problem.host_lack(host_bytes, setting)):
            continue
        prefill, decode = zip(setting.row_ps, setting.row_bytes, strict=True)
        # equal layers are read alike: only the last one may be taken in part
        alike = Counter((problem.compute.keys[i], len(units)) for i, units in by_layer.items())
        examples = {(problem.compute.keys[i], len(units)): units for i, units in by_layer.items()}
        for key, count in alike.items():
            step = problem.read_step_in_place(examples[key])
            prompt = problem.read_in_place(examples[key], setting.chunk_tokens)
            decode = decode[0] + count * step[0], decode[1] + count * step[1]
            prefill = prefill[0] + count * prompt[0], prefill[1] + count * prompt[1]
        yield Family(
            prefill_ps=setting.prefill.resident_ps + prefill[0],
            decode_ps=problem.decode.resident_ps + decode[0],
            link_bytes=problem.objective(prefill[1], decode[1]),
            prefetch_step=1,
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            num_segments=len(segment_class.segments),
            segments=segment_class.segments,
            prefill=Backend.UVA,
            decode=Backend.UVA,
            max_bytes=max_bytes,
            patterns=(),
        )


def _roundest(low: int, high: int) -> int:
    """The roundest size above ``low`` and up to ``high``: all of them take the same parameters."""
    unit = 1 << high.bit_length()
    while high // unit * unit <= low:
        unit >>= 1
    return high // unit * unit
