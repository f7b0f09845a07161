"""Plans of several rules: which combinations can beat a given value, by proven bounds.

The space: rules over segment classes that have no parameter in common, each with its own group
pattern and backends, over all ring sizes and settings. The order of such rules makes no difference.
Of the patterns that take as many layers of each kind only that of the smallest groups is tried: it
spreads them most evenly. A ring is smaller than the number of layers that stream through it.

Outside the space, though a plan can say it: classes that overlap, or one class twice, where the
first rule that matches a parameter wins (a class streamed in some layers and read in place in
others: classes that split the same weights come near it), and a rule of ``max_bytes`` beside
others (it reads in place what a pattern of as many bytes does, and can only be nearer to the bytes
that are needed: by less than one layer's).

The bounds relax what can only help: several spans of one layer need no second start of a copy, and
a class as a whole is taken by the byte, at its cheapest rate. Reading in place delays compute, link
and every slot alike, so its time adds to whatever the rest of the pass takes.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from offplan.plan import Backend
from offplan.planner.contents import Choice
from offplan.planner.passes import Backends, PassBounds, Taken
from offplan.planner.patterns import Pattern, group_patterns
from offplan.planner.problem import KindCosts, Problem, kind_costs
from offplan.planner.segments import SegmentClass, segment_classes
from offplan.planner.space import PREFETCH_STEPS, Totals, by_signature, list_backends, sum_up
from offplan.planner.targets import NEVER, Cut, Goal, Time

_MEANS = (0.0, 0.5, 1.0)
"""Shares of the copies in a mean of copies and compute."""


@dataclass(frozen=True)
class ClassOptions:
    """A segment class with all the sets of layers that patterns can take of it."""

    segment_class: SegmentClass
    units: frozenset[tuple[int, int]]
    """What it takes: kind of layer, number of the unit in it."""
    costs: tuple[KindCosts, ...]
    """Of each kind of layer; zeros where it takes nothing."""
    groups: tuple[tuple[Totals, Pattern], ...]
    """By the bytes they take off the GPU, the least first."""

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes that each group takes off the GPU."""
        return [totals.unit_bytes for totals, _ in self.groups]

    @cached_property
    def least_slab_bytes(self) -> int:
        """Of a layer that has something of it."""
        return min(kind.slab_bytes for kind in self.present)

    @cached_property
    def present(self) -> list[KindCosts]:
        """Of the kinds that have something of it."""
        return [kind for kind in self.costs if kind.unit_bytes]


Groups = tuple[int, ...]
"""A group of each class, by number."""


class Rate(NamedTuple):
    """What a byte of a class costs at least, prefill first, and what its costliest layer does."""

    copy_ps: tuple[float, float]
    uva_ps: tuple[float, float]
    slowest_copy_ps: int
    slowest_uva_ps: int
    """In decode, where a ring may have kept it; 0 where none can."""
    layer_bytes: int
    """Most that it takes of a layer."""


class PhaseCost(NamedTuple):
    """How the least time of a phase grows with the bytes taken of each class."""

    copy_ps: tuple[float, ...]
    spared_copy_ps: float
    uva_ps: tuple[float, ...]
    spared_uva_ps: float
    compute_ps: int
    fixed_ps: float

    def at(self, first: float, second: float) -> float:
        """Least time for these bytes."""
        copy_ps = first * self.copy_ps[0] + second * self.copy_ps[1] - self.spared_copy_ps
        uva_ps = first * self.uva_ps[0] + second * self.uva_ps[1] - self.spared_uva_ps
        return (
            self.fixed_ps
            + (uva_ps if uva_ps > 0 else 0)
            + (copy_ps if copy_ps > self.compute_ps else self.compute_ps)
        )

    def take(self, third: float) -> "PhaseCost":
        """What the first two classes cost beside these bytes of the third."""
        return self._replace(
            copy_ps=self.copy_ps[:2],
            uva_ps=self.uva_ps[:2],
            spared_copy_ps=self.spared_copy_ps - third * self.copy_ps[2],
            spared_uva_ps=self.spared_uva_ps - third * self.uva_ps[2],
        )

    def bends(self, needed: float) -> Iterator[float]:
        """Bytes of the first class, the second making up the rest, where the time may bend."""
        for (first, second), start in (
            (self.copy_ps, self.compute_ps + self.spared_copy_ps),
            (self.uva_ps, self.spared_uva_ps),
        ):
            if first != second:
                yield (start - second * needed) / (first - second)


@dataclass(frozen=True)
class _Line:
    """Two classes taken by the byte: so much of the first, and of the second what remains.

    Each phase's least time is convex and piecewise linear along it, and so is any sum of them: the
    least is at a corner, and the parts that keep a cut are an interval.
    """

    costs: tuple[PhaseCost, PhaseCost]
    needed: int
    """Bytes of both."""
    ends: tuple[int, int]
    """Of the first class."""
    least: int
    """Of the second."""

    def times(self, first: float, second: float) -> tuple[float, float]:
        """Least times for these bytes."""
        return self.costs[0].at(first, second), self.costs[1].at(first, second)

    @cached_property
    def corners(self) -> list[tuple[float, float, float]]:
        """Bytes of the first class, and the times, wherever a phase's time may be least."""
        low, high = self.ends
        # beyond this the second class is at its least, and more of the first only costs more
        high = min(max(low, self.needed - self.least), high)
        bends = (at for cost in self.costs for at in cost.bends(self.needed) if low < at < high)
        return [
            (at, *self.times(at, max(self.least, self.needed - at))) for at in (low, high, *bends)
        ]

    def reaches(self, cut: Cut) -> bool:
        """Whether any point keeps the cut."""
        first, second, most = cut
        return any(first * prefill + second * decode <= most for _, prefill, decode in self.corners)

    def bound(self, goal: Goal) -> Time:
        """No plan on the line is better."""
        return goal.least([corner[1:] for corner in self.corners])

    def keeping(self, cut: Cut, sizes: Sequence[int], within: range) -> range:
        """Those of the first class's sizes, in their order, at which the cut may be kept."""
        first, second, most = cut
        if most == NEVER:
            return within

        def keeps(number: int) -> bool:
            prefill, decode = self.times(at := sizes[number], max(self.least, self.needed - at))
            return first * prefill + second * decode <= most

        best = min(self.corners, key=lambda corner: first * corner[1] + second * corner[2])
        middle = bisect_left(sizes, best[0], within.start, within.stop)
        start = bisect_left(range(middle), True, within.start, key=keeps)
        stop = bisect_left(range(within.stop), True, middle, key=lambda number: not keeps(number))
        return range(start, stop)


@dataclass(frozen=True)
class _Mix:
    """Classes taken by the byte: as much of each as makes the time least."""

    costs: tuple[PhaseCost, PhaseCost]
    needed: int
    """Bytes of all."""
    ends: tuple[tuple[int, int], ...]
    """The least and the most bytes of each class."""

    def least_ps(self, cut: Cut) -> float:
        """Least weighed time of both phases.

        max(compute, copies) is at least any mean of both. For a given mean all costs are linear, so
        the cheapest bytes are taken first; the best of some means is a bound (Lagrange's).
        """
        return max(
            self._least_linear_ps(((cut.prefill, prefill), (cut.decode, decode)))
            for prefill in (_MEANS if cut.prefill else (0.0,))
            for decode in (_MEANS if cut.decode else (0.0,))
        )

    def _least_linear_ps(self, weighed: Sequence[tuple[int, float]]) -> float:
        least, rates = 0.0, [0.0] * len(self.ends)
        for cost, (weight, mean) in zip(self.costs, weighed, strict=True):
            least += weight * (
                cost.fixed_ps
                + (1 - mean) * cost.compute_ps
                - mean * cost.spared_copy_ps
                - cost.spared_uva_ps
            )
            for number, (copy, uva) in enumerate(zip(cost.copy_ps, cost.uva_ps, strict=True)):
                rates[number] += weight * (uva + mean * copy)
        left = self.needed - sum(low for low, _ in self.ends)
        for rate, (low, high) in sorted(zip(rates, self.ends, strict=True)):
            more = min(max(left, 0), high - low)
            least += rate * (low + more)
            left -= more
        return least


class Combination(NamedTuple):
    """Classes with their backends, a ring and a setting; sorted by its bound."""

    bound: Time
    """No plan of it has a lower value."""
    classes: tuple[int, ...]
    """By number."""
    backends: tuple[Backends, ...]
    num_slots: int
    setting: int

    @property
    def decode_streams(self) -> bool:
        """Whether the ring turns in decode."""
        return any(decode is Backend.PREFETCH for _, decode in self.backends)


class Candidate(NamedTuple):
    """A plan of a combination; sorted by its bound."""

    bound: Time
    decode_ps: float
    """No less than this."""
    groups: Groups


@dataclass(frozen=True)
class Combinations:
    """All combinations of one problem."""

    problem: Problem
    options: tuple[ClassOptions, ...]

    def bounds(self, num_rules: int, goal: Goal, limit: Time) -> Iterator[Combination]:
        """List the combinations that may hold a plan better than ``limit``."""
        for classes in self._disjoint_classes(num_rules):
            for backends in product(list_backends(self.problem), repeat=num_rules):
                for num_slots in _rings(backends):
                    for setting in range(len(self.problem.settings)):
                        combined = Combination(0, classes, backends, num_slots, setting)
                        bound = self._relax(combined, goal, limit)
                        if bound is not None:
                            yield combined._replace(bound=bound)

    def count(self, num_rules: int) -> int:
        """How many plans of so many rules there are, whatever machine and budget."""
        rings = sum(
            len(_rings(backends))
            for backends in product(list_backends(self.problem), repeat=num_rules)
        )
        groups = (
            prod(len(self.options[number].groups) for number in classes)
            for classes in self._disjoint_classes(num_rules)
        )
        return sum(groups) * rings * len(self.problem.settings)

    def _disjoint_classes(self, num_rules: int) -> list[tuple[int, ...]]:
        """Classes that have nothing in common; of three, that of the fewest groups comes last."""
        chosen = combinations(range(len(self.options)), num_rules)
        disjoint = [classes for classes in chosen if self._are_disjoint(classes)]
        if num_rules == 2:
            return disjoint
        sizes = [len(option.groups) for option in self.options]
        return [tuple(sorted(classes, key=lambda n: -sizes[n])) for classes in disjoint]

    def _relax(self, combined: Combination, goal: Goal, limit: Time) -> Time | None:
        """Bound of a combination taken by the byte; None where no plan is better than ``limit``."""
        if len(combined.classes) == 2:
            line = self._line(combined, ())
            if line is None or not all(map(line.reaches, goal.cuts(limit))):
                return None
            return line.bound(goal)
        mix = self._mix(combined)
        if mix is None or any(mix.least_ps(cut) > cut.most_ps for cut in goal.cuts(limit)):
            return None
        prefill, decode = mix.least_ps(Cut(1, 0, NEVER)), mix.least_ps(Cut(0, 1, NEVER))
        return goal.least([(prefill, decode)])

    def _mix(self, combined: Combination) -> "_Mix | None":
        """Any number of classes taken by the byte; None where they do not suffice."""
        options = [self.options[number] for number in combined.classes]
        slot = self._slot_bytes(combined, [option.least_slab_bytes for option in options])
        needed = self.problem.settings[combined.setting].lacking_bytes + combined.num_slots * slot
        ends = tuple((option.sizes[0], option.sizes[-1]) for option in options)
        if needed > sum(most for _, most in ends):
            return None
        return _Mix(self._costs(combined), needed, ends)

    def _are_disjoint(self, classes: Sequence[int]) -> bool:
        units = [self.options[number].units for number in classes]
        return len(frozenset().union(*units)) == sum(map(len, units))

    def candidates(self, combined: Combination, goal: Goal, limit: Time) -> Iterator[Candidate]:
        """List a combination's plans that may be better than ``limit``."""
        others = (range(len(self.options[number].groups)) for number in combined.classes[2:])
        for rest in product(*others):
            line = self._line(combined, rest)
            if line is not None and all(map(line.reaches, goal.cuts(limit))):
                yield from self._along(line, combined, rest, goal, limit)

    def _along(
        self, line: "_Line", combined: Combination, rest: Groups, goal: Goal, limit: Time
    ) -> Iterator[Candidate]:
        """List the plans with these groups of all but the first two classes."""
        a, b = (self.options[number] for number in combined.classes[:2])
        setting, shared = self.problem.settings[combined.setting], self._shared_slots(combined)
        others = [self._take(combined, rule, group) for rule, group in enumerate(rest, 2)]
        spare = setting.lacking_bytes - sum(other.totals.unit_bytes for other in others)
        slots = [other.totals.slot_bytes for other in others]
        within = range(len(a.groups))
        for cut in goal.cuts(limit):
            within = line.keeping(cut, a.sizes, within)
        for one in within:
            first, size = self._take(combined, 0, one), a.sizes[one]
            each = (first.totals.slot_bytes, b.least_slab_bytes, *slots)
            own_slot, lacking = self._slot_bytes(combined, each), spare - size
            start = bisect_left(b.sizes, lacking + combined.num_slots * own_slot)
            for other in range(start, len(b.groups)):
                least = line.times(size, b.sizes[other])
                if goal.value(*least) >= limit:
                    break  # by the byte, more only costs more
                second = self._take(combined, 1, other)
                both = first.pattern.layers & second.pattern.layers
                held = [held for layers, held in shared if layers & both]
                slot = max(
                    own_slot, self._slot_bytes(combined, (0, second.totals.slot_bytes)), *held
                )
                if b.sizes[other] < lacking + combined.num_slots * slot:
                    continue
                times = self._bound_ps(combined, (first, second, *others), least[1], goal, limit)
                if times is not None:
                    groups = (one, other, *rest)
                    yield Candidate(goal.value(*times), times[1], groups)

    def _shared_slots(self, combined: Combination) -> list[tuple[int, int]]:
        """Layers of a kind, and what a slot holds of them if the first two rules stream both."""
        if not all(map(_streams, combined.backends[:2])):
            return []
        costs = (self.options[number].costs for number in combined.classes[:2])
        held = [sum(kind.slab_bytes for kind in kinds) for kinds in zip(*costs, strict=True)]
        return list(zip(self.problem.layers_of_kind, held, strict=True))

    def choices(self, combined: Combination, candidate: Candidate) -> tuple[Choice, ...]:
        """The rules of a candidate."""
        return tuple(
            Choice(self.options[number].segment_class, *backends, self.options[number].groups[g][1])
            for number, backends, g in zip(
                combined.classes, combined.backends, candidate.groups, strict=True
            )
        )

    def _slot_bytes(self, combined: Combination, slots: Sequence[int]) -> int:
        """The largest of these slots, those of the first classes, among those that need one."""
        streamed = zip(slots, combined.backends, strict=False)
        return max((slot for slot, backends in streamed if _streams(backends)), default=0)

    def _take(self, combined: Combination, rule: int, group: int) -> Taken:
        """What one of the rules takes."""
        number = combined.classes[rule]
        option = self.options[number]
        return Taken(number, option.costs, *option.groups[group], combined.backends[rule])

    def _bound_ps(
        self,
        combined: Combination,
        taken: Sequence[Taken],
        decode_ps: float,
        goal: Goal,
        limit: Time,
    ) -> tuple[float, float] | None:
        """Least times of a plan, of decode at least this; None unless it may beat ``limit``."""
        where = combined.num_slots, combined.setting
        longest = 0.0
        for rule in taken:
            longest = max(longest, self.passes.alone_ps(rule, *where))
            if goal.value(longest, decode_ps) >= limit:
                return None
        times = self.passes.least_ps(taken, *where)
        if times is None:
            return None
        longest = max(longest, times[0])
        return (longest, times[1]) if goal.value(longest, times[1]) < limit else None

    @cached_property
    def passes(self) -> PassBounds:
        """Bounds single plans."""
        return PassBounds(self.problem)

    def _line(self, combined: Combination, rest: Groups) -> "_Line | None":
        """The first two classes by the byte, beside these groups; None where all do not suffice."""
        a, b = (self.options[number] for number in combined.classes[:2])
        others = [self._take(combined, rule, group).totals for rule, group in enumerate(rest, 2)]
        slots = (a.least_slab_bytes, b.least_slab_bytes, *(other.slot_bytes for other in others))
        needed = self.problem.settings[combined.setting].lacking_bytes
        needed += combined.num_slots * self._slot_bytes(combined, slots)
        needed -= sum(other.unit_bytes for other in others)
        low, high = max(a.sizes[0], needed - b.sizes[-1]), a.sizes[-1]
        if low > high:
            return None
        prefill, decode = self._costs(combined)
        for other in others:
            prefill, decode = prefill.take(other.unit_bytes), decode.take(other.unit_bytes)
        return _Line((prefill, decode), needed, (low, high), b.sizes[0])

    def _costs(self, combined: Combination) -> tuple[PhaseCost, PhaseCost]:
        """What bytes of the classes cost at least in each phase."""
        num_slots = combined.num_slots
        rates = [
            self._rates[combined.setting][key]
            for key in zip(combined.classes, combined.backends, strict=True)
        ]
        setting = self.problem.settings[combined.setting]
        owners = [self._most_owners(combined, rates, phase) for phase in (0, 1)]
        spared, kept = [0, 0], 0
        for rate, (in_prefill, in_decode) in zip(rates, combined.backends, strict=True):
            if in_decode is Backend.PREFETCH:  # of a prompt's slabs these may be in the ring
                spared[0] += num_slots * rate.slowest_copy_ps
                spared[1] += owners[1] * rate.slowest_copy_ps
            elif in_prefill is Backend.PREFETCH:
                spared[0] += owners[0] * rate.slowest_copy_ps
                kept += 0 if combined.decode_streams else num_slots * rate.slowest_uva_ps
        prefill, decode = (
            PhaseCost(
                tuple(rate.copy_ps[phase] for rate in rates),
                spared[phase],
                tuple(rate.uva_ps[phase] for rate in rates),
                (0, kept)[phase],
                compute_ps,
                setting.row_ps[phase] - self.passes.slack_ps[combined.setting][phase],
            )
            for phase, compute_ps in enumerate(
                (setting.prefill.resident_ps, self.problem.decode.resident_ps)
            )
        )
        return prefill, decode

    def _most_owners(self, combined: Combination, rates: Sequence[Rate], phase: int) -> int:
        """Layers with a slot of their own, at most: 2 K - n, if n stream through K slots.

        At least as many stream as hold what the other classes cannot.
        """
        lacking = self.problem.settings[combined.setting].lacking_bytes
        layer_bytes = 0
        for number, rate, backends in zip(combined.classes, rates, combined.backends, strict=True):
            if backends[phase] is Backend.PREFETCH:
                layer_bytes += rate.layer_bytes
            else:
                lacking -= self.options[number].sizes[-1]
        if not layer_bytes:
            return 0
        num_users = max(1, -(-lacking // layer_bytes))
        return min(combined.num_slots, max(0, 2 * combined.num_slots - num_users))

    @cached_property
    def _rates(self) -> tuple[dict[tuple[int, Backends], Rate], ...]:
        """For each setting, by class and backends."""
        return tuple(
            {
                (number, backends): _rate(option.present, backends, setting, self.passes.start_ps)
                for number, option in enumerate(self.options)
                for backends in list_backends(self.problem)
            }
            for setting in range(len(self.problem.settings))
        )


def list_combinations(problem: Problem) -> Combinations:
    """Prepare the combinations of a problem."""
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
        ordered = tuple(sorted(groups, key=lambda group: group[0].unit_bytes))
        options.append(ClassOptions(segment_class, units, costs, ordered))
    return Combinations(problem, tuple(options))


def _rate(costs: Sequence[KindCosts], backends: Backends, setting: int, start_ps: int) -> Rate:
    streams = [backend is Backend.PREFETCH for backend in backends]
    copy = min((kind.copy_ps - start_ps) / kind.unit_bytes for kind in costs)
    reads = (
        min(kind.prefill_uva_ps[setting] / kind.unit_bytes for kind in costs),
        min(kind.decode_uva_ps / kind.unit_bytes for kind in costs),
    )
    return Rate(
        (copy * streams[0], copy * streams[1]),
        (reads[0] * (not streams[0]), reads[1] * (not streams[1])),
        slowest_copy_ps=max(kind.copy_ps for kind in costs),
        slowest_uva_ps=max(kind.decode_uva_ps for kind in costs),
        layer_bytes=max(kind.unit_bytes for kind in costs),
    )


def _rings(backends: Sequence[Backends]) -> tuple[int, ...]:
    """Ring sizes that make a difference."""
    return PREFETCH_STEPS if any(map(_streams, backends)) else (0,)


def _streams(backends: Backends) -> bool:
    return Backend.PREFETCH in backends
