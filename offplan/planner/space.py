"""The plans of at most one rule: those that fit, their memory by arithmetic."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from offplan.placement import Unit
from offplan.plan import Backend
from offplan.planner.classes import PricedClass
from offplan.planner.families import Family, Shortfall
from offplan.planner.problem import Problem, slab_bytes
from offplan.planner.singles import FamilyGroup, Singles

PREFETCH_STEPS = (1, 2, 3, 4)
"""Ring sizes tried."""

BACKENDS = (
    (Backend.PREFETCH, Backend.PREFETCH),
    (Backend.PREFETCH, Backend.UVA),
    (Backend.UVA, Backend.UVA),
)
"""Prefill's and decode's backend. Decode by prefetch with prefill in place is not tried: a prompt's
rows are never fewer than a step's, so where reading in place is no faster than copying, as on every
link measured so far, it never suits the prompt better."""


def list_backends(problem: Problem) -> tuple[tuple[Backend, Backend], ...]:
    """BACKENDS, without those that the store does not serve, or an engine has no flag for."""
    kernels_reach = problem.machine.store == "host"
    return tuple(
        (prefill, decode)
        for prefill, decode in BACKENDS
        if (kernels_reach or Backend.UVA not in (prefill, decode))
        and (problem.restriction is None or prefill is decode)
    )


def list_singles(problem: Problem, classes: Sequence[PricedClass]) -> Singles:
    """List the plans of at most one rule."""
    shortfall = Shortfall()
    families = list(_resident_families(problem, shortfall))
    groups: list[FamilyGroup] = []
    for priced in classes:
        families += _max_bytes_families(problem, priced, shortfall)
        groups += _list_groups(problem, priced, shortfall)
    return Singles(problem, families, groups, shortfall)


def _list_groups(
    problem: Problem, priced: PricedClass, shortfall: Shortfall
) -> Iterator[FamilyGroup]:
    """List the groups of a class, each with the settings that it fits."""
    settings = sorted((each.lacking_bytes, i) for i, each in enumerate(problem.settings))
    lacking, numbers = [size for size, _ in settings], [number for _, number in settings]
    rings: dict[int, list[tuple[Backend, Backend]]] = {}
    for backends in list_backends(problem):
        for num_slots in PREFETCH_STEPS if Backend.PREFETCH in backends else (0,):
            rings.setdefault(num_slots, []).append(backends)
    for totals, patterns in priced.groups:
        lacks = [problem.host_lack(totals.slab_bytes, problem.settings[i]) for i in numbers]
        for num_slots, ring_backends in rings.items():
            if num_slots and totals.num_layers <= num_slots:
                continue  # every layer would own a slot: resident in all but name
            saved_bytes = totals.unit_bytes - num_slots * totals.slot_bytes
            num_settings = bisect_right(lacking, saved_bytes)
            host_lack = min(lacks[:num_settings], default=0)
            if not shortfall.note(lacking[0] - saved_bytes, host_lack):
                continue
            fitting = tuple(
                i for i, lack in zip(numbers[:num_settings], lacks, strict=False) if lack <= 0
            )
            for backends in ring_backends:
                yield FamilyGroup(
                    priced.segment_class, totals, patterns, *backends, num_slots, fitting
                )


def _resident_families(problem: Problem, shortfall: Shortfall) -> Iterator[Family]:
    for setting in problem.settings:
        if not shortfall.note(setting.lacking_bytes, problem.host_lack(0, setting)):
            continue
        prefill_ps, decode_ps = problem.resident_ps(setting)
        yield Family(
            prefill_ps=prefill_ps,
            decode_ps=decode_ps,
            link_bytes=problem.objective(*setting.row_bytes),
            prefetch_step=1,
            minus_chunk=-setting.prefill_chunk,
            embeddings=setting.embeddings,
            segments=(),
            prefill=Backend.UVA,
            decode=Backend.UVA,
            max_bytes=0,
            patterns=(),
        )


def _max_bytes_families(
    problem: Problem, priced: PricedClass, shortfall: Shortfall
) -> Iterator[Family]:
    """Read the first parameters in place, as few as fit: for each setting one candidate.

    More of them would only move more bytes, so no other ``max_bytes`` can be better.
    """
    taken = [
        (layer, unit) for layer, kind in enumerate(problem.kind_of) for unit in priced.units[kind]
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
            segments=priced.segment_class.segments,
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
