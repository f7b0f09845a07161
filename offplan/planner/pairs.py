"""Plans of two rules: which pairs can beat a given time, by proven bounds.

The space: two rules over segment classes that have no parameter in common, each with its own group
pattern and backends, over all ring sizes and settings. The order of such rules makes no difference.
Of the patterns that take as many layers of each kind only that of the smallest groups is tried: it
spreads them most evenly. A ring is smaller than the number of layers that stream through it.

The bounds relax what can only help: two spans of one layer need no larger slot than the larger of
them, and no second start of a copy; a class as a whole is taken by the byte, at its cheapest rate.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

from offplan.costs.timeline import to_ps
from offplan.plan import Backend
from offplan.planner.contents import Choice
from offplan.planner.patterns import Pattern, group_patterns
from offplan.planner.problem import KindCosts, Problem, kind_costs
from offplan.planner.segments import SegmentClass, segment_classes
from offplan.planner.space import PREFETCH_STEPS, Totals, by_signature, list_backends, sum_up

Backends = tuple[Backend, Backend]


@dataclass(frozen=True)
class ClassOptions:
    """A segment class with all the sets of layers that patterns can take of it."""

    segment_class: SegmentClass
    units: frozenset[tuple[int, int]]
    """What it takes: kind of layer, number of the unit in it."""
    costs: tuple[KindCosts, ...]
    """Of the kinds that have something of it."""
    groups: tuple[tuple[Totals, Pattern], ...]
    """By the bytes they take off the GPU, the least first."""

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes that each group takes off the GPU."""
        return [totals.unit_bytes for totals, _ in self.groups]


class Load(NamedTuple):
    """What passes pay for, in picoseconds: prefill first, then decode."""

    copy_ps: tuple[float, float]
    uva_ps: tuple[float, float]


class Slope(NamedTuple):
    """How a pair's least time grows with the bytes taken of each class.

    A phase: copy of a byte of the first, and of the second, what the ring spares; the same of
    reading in place.
    """

    prefill: tuple[float, float, float, float, float, float]
    decode: tuple[float, float, float, float, float, float]
    prefill_ps: int
    """With everything resident."""
    decode_ps: int
    fixed_ps: float
    """Whatever the rules are."""
    weights: tuple[int, int]
    """Of prefill, and of decode."""

    def at(self, first: float, second: float) -> float:
        """Least time of a request."""
        a, b, spared, c, d, kept = self.prefill
        prefill = max(0.0, c * first + d * second - kept)
        prefill += max(self.prefill_ps, a * first + b * second - spared)
        a, b, spared, c, d, kept = self.decode
        decode = max(0.0, c * first + d * second - kept)
        decode += max(self.decode_ps, a * first + b * second - spared)
        return self.fixed_ps + self.weights[0] * prefill + self.weights[1] * decode


class PairBound(NamedTuple):
    """A pair of classes with their backends, a ring and a setting; sorted by its bound."""

    bound_ps: float
    """No plan of it takes less."""
    first: int
    """A class, by number."""
    second: int
    backends: tuple[Backends, Backends]
    num_slots: int
    setting: int


class PairCandidate(NamedTuple):
    """A plan of two rules; sorted by its bound."""

    bound_ps: float
    pair: PairBound
    groups: tuple[int, int]
    """Of each class, by number."""


@dataclass(frozen=True)
class Pairs:
    """All pairs of one problem."""

    problem: Problem
    options: tuple[ClassOptions, ...]

    def bounds(self, limit_ps: float) -> Iterator[PairBound]:
        """List the pairs of classes that may hold a plan faster than ``limit_ps``."""
        allowed = list_backends(self.problem)
        for first, second in combinations(range(len(self.options)), 2):
            if self.options[first].units & self.options[second].units:
                continue
            for backends in product(allowed, allowed):
                uses_ring = any(map(_streams, backends))
                for num_slots in PREFETCH_STEPS if uses_ring else (0,):
                    for setting in range(len(self.problem.settings)):
                        pair = PairBound(0.0, first, second, backends, num_slots, setting)
                        bound_ps = self._relaxed_ps(pair)
                        if bound_ps < limit_ps:
                            yield pair._replace(bound_ps=bound_ps)

    def candidates(self, pair: PairBound, limit_ps: float) -> Iterator[PairCandidate]:
        """List a pair's plans that may be faster than ``limit_ps``."""
        a, b = self.options[pair.first], self.options[pair.second]
        slope = self._slope(pair)
        for one, (first, _) in enumerate(a.groups):
            needed = self._needed(pair, first.slot_bytes, 0) - first.unit_bytes
            for other in range(bisect_left(b.sizes, needed), len(b.groups)):
                if slope.at(first.unit_bytes, b.sizes[other]) >= limit_ps:
                    break  # by the byte, more only costs more
                second = b.groups[other][0]
                lacking = self._needed(pair, first.slot_bytes, second.slot_bytes)
                if first.unit_bytes + second.unit_bytes < lacking:
                    continue
                bound_ps = self._bound_ps(pair, first, second)
                if bound_ps < limit_ps:
                    yield PairCandidate(bound_ps, pair, (one, other))

    def choices(self, candidate: PairCandidate) -> tuple[Choice, Choice]:
        """The rules of a candidate."""
        pair = candidate.pair
        a, b = self.options[pair.first], self.options[pair.second]
        return (
            Choice(a.segment_class, *pair.backends[0], a.groups[candidate.groups[0]][1]),
            Choice(b.segment_class, *pair.backends[1], b.groups[candidate.groups[1]][1]),
        )

    def _needed(self, pair: PairBound, first_slot: int, second_slot: int) -> int:
        """Bytes to take off the GPU, those of the ring's slots included."""
        slots = [
            slot
            for slot, backends in zip((first_slot, second_slot), pair.backends, strict=True)
            if _streams(backends)
        ]
        lacking = self.problem.settings[pair.setting].lacking_bytes
        return lacking + pair.num_slots * max(slots, default=0)

    def _bound_ps(self, pair: PairBound, first: Totals, second: Totals) -> float:
        """Least time of plans that take these groups of the two classes."""
        start_ps = to_ps(self.problem.machine.copy_latency.value) + _ROUNDING_PS
        copies, reads, skips, turns = [0.0, 0.0], [0.0, 0.0], [0, 0], [0, 0]
        most = [0, 0]
        for totals, backends in zip((first, second), pair.backends, strict=True):
            for phase, backend in enumerate(backends):
                if backend is Backend.UVA:
                    reads[phase] += (totals.prefill_uva_ps[pair.setting], totals.decode_uva_ps)[
                        phase
                    ]
                    continue
                copies[phase] += totals.copy_ps - totals.num_layers * start_ps
                skips[phase] += totals.slowest_copy_ps
                most[phase] = max(most[phase], totals.num_layers)
                computing = totals.prefill_compute_ps[pair.setting], totals.decode_compute_ps
                turns[phase] = max(turns[phase], computing[phase])
            if backends == (Backend.PREFETCH, Backend.UVA) and not _decode_streams(pair):
                reads[1] -= pair.num_slots * totals.slowest_uva_ps
        for phase in (0, 1):
            copies[phase] += most[phase] * start_ps
            # layers with a slot of their own; all are, where a phase has no more layers than slots
            skipped = max(0, 2 * pair.num_slots - most[phase])
            if phase == 0 and _decode_streams(pair):
                skipped = max(skipped, pair.num_slots)
            copies[phase] -= min(skipped, pair.num_slots) * skips[phase]
            if pair.num_slots == 1:
                copies[phase] += turns[phase]
        return self._request_ps(pair, Load(_two(copies), _two(reads)))

    def _request_ps(self, pair: PairBound, load: Load) -> float:
        setting = self.problem.settings[pair.setting]
        slack = self._slack_ps[pair.setting]
        prefill, decode = (
            rows + max(0.0, uva) + max(compute, copy) - less
            for rows, uva, compute, copy, less in zip(
                setting.row_ps,
                load.uva_ps,
                (setting.prefill.resident_ps, self.problem.decode.resident_ps),
                load.copy_ps,
                slack,
                strict=True,
            )
        )
        return self.problem.weights[0] * prefill + self.problem.weights[1] * decode

    @cached_property
    def _slack_ps(self) -> tuple[tuple[float, float], ...]:
        """What rounding may take off when two rules read one layer: two bytes in each chunk."""
        byte_ps = 1e12 / self.problem.machine.uva.value
        layers = len(self.problem.model.layers)
        return tuple(
            (
                layers * (2 * byte_ps * len(setting.prefill.shapes) + _ROUNDING_PS),
                layers * (2 * byte_ps + _ROUNDING_PS),
            )
            for setting in self.problem.settings
        )

    def _relaxed_ps(self, pair: PairBound) -> float:
        """Least time when both classes are taken by the byte; infinite where they do not suffice.

        Convex and piecewise linear in the bytes of the first class, the second making up the rest:
        the least is at an end or at a bend, where copies begin to outlast compute.
        """
        a, b = self.options[pair.first], self.options[pair.second]
        needed = self._needed(pair, *(min(k.slab_bytes for k in o.costs) for o in (a, b)))
        low, high = max(a.sizes[0], needed - b.sizes[-1]), a.sizes[-1]
        if low > high:
            return float("inf")
        slope = self._slope(pair)
        # beyond this the second class is at its least, and more of the first only costs more
        bend = min(max(low, needed - b.sizes[0]), high)
        points = [float(low), float(bend)]
        for phase, compute_ps in (
            (slope.prefill, slope.prefill_ps),
            (slope.decode, slope.decode_ps),
        ):
            first, second, spared, *_ = phase
            if first != second:
                points.append((compute_ps + spared - second * needed) / (first - second))
        return min(slope.at(at, max(b.sizes[0], needed - at)) for at in points if low <= at <= bend)

    def _slope(self, pair: PairBound) -> "Slope":
        """What bytes of the two classes cost at least."""
        one, spared_one = self._rates[pair.setting][pair.first, pair.backends[0]]
        two, spared_two = self._rates[pair.setting][pair.second, pair.backends[1]]
        kept = 0 if _decode_streams(pair) else pair.num_slots
        spared_uva = 0, kept * (spared_one.uva_ps[1] + spared_two.uva_ps[1])
        prefill, decode = (
            (
                one.copy_ps[phase],
                two.copy_ps[phase],
                pair.num_slots * (spared_one.copy_ps[phase] + spared_two.copy_ps[phase]),
                one.uva_ps[phase],
                two.uva_ps[phase],
                spared_uva[phase],
            )
            for phase in (0, 1)
        )
        setting, weights = self.problem.settings[pair.setting], self.problem.weights
        fixed_ps = sum(
            weight * (rows - less)
            for weight, rows, less in zip(
                weights, setting.row_ps, self._slack_ps[pair.setting], strict=True
            )
        )
        resident = setting.prefill.resident_ps, self.problem.decode.resident_ps
        return Slope(prefill, decode, *resident, fixed_ps, weights)

    @cached_property
    def _rates(self) -> tuple[dict[tuple[int, Backends], tuple[Load, Load]], ...]:
        """For each setting, by class and backends: the load of a byte, and the costliest layer."""
        start_ps = to_ps(self.problem.machine.copy_latency.value) + _ROUNDING_PS
        return tuple(
            {
                (number, backends): _rate(option.costs, backends, setting, start_ps)
                for number, option in enumerate(self.options)
                for backends in list_backends(self.problem)
            }
            for setting in range(len(self.problem.settings))
        )


_ROUNDING_PS = 2
"""Sums of rounded times may exceed the rounded time of the sum by less."""


def list_pairs(problem: Problem) -> Pairs:
    """Prepare the pairs of a problem."""
    patterns = group_patterns(len(problem.model.layers))
    options = []
    for segment_class in segment_classes(problem.model):
        costs = kind_costs(problem, segment_class)
        groups = [
            (sum_up(signature, costs), members[0])
            for signature, members in by_signature(problem, costs, patterns).items()
        ]
        units = frozenset(
            (kind, number)
            for kind, units in enumerate(problem.units_of_kind)
            for number, unit in enumerate(units)
            if segment_class.takes(unit)
        )
        present = tuple(kind for kind in costs if kind.unit_bytes)
        ordered = tuple(sorted(groups, key=lambda group: group[0].unit_bytes))
        options.append(ClassOptions(segment_class, units, present, ordered))
    return Pairs(problem, tuple(options))


def _rate(
    costs: Sequence[KindCosts], backends: Backends, setting: int, start_ps: int
) -> tuple[Load, Load]:
    streams = [backend is Backend.PREFETCH for backend in backends]

    copy = min((kind.copy_ps - start_ps) / kind.unit_bytes for kind in costs)
    reads = (
        min(kind.prefill_uva_ps[setting] / kind.unit_bytes for kind in costs),
        min(kind.decode_uva_ps / kind.unit_bytes for kind in costs),
    )
    slowest = max(kind.copy_ps for kind in costs)
    kept = max(kind.decode_uva_ps for kind in costs) if backends[0] is Backend.PREFETCH else 0
    rate = Load(
        (copy * streams[0], copy * streams[1]),
        (reads[0] * (not streams[0]), reads[1] * (not streams[1])),
    )
    return rate, Load((slowest * streams[0], slowest * streams[1]), (0, kept * (not streams[1])))


def _two(values: Sequence[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _streams(backends: Backends) -> bool:
    return Backend.PREFETCH in backends


def _decode_streams(pair: PairBound) -> bool:
    return any(decode is Backend.PREFETCH for _, decode in pair.backends)
