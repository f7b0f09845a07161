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

Bounds come in steps, each for fewer plans: of what classes could do with any backends, by the byte;
of a combination; of its plans, group by group (``planner.candidates``).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from offplan.planner.classes import PricedClass, price_classes
from offplan.planner.contents import Choice
from offplan.planner.context import Column, Context, is_complete, is_possible
from offplan.planner.options import Backends, Option, are_disjoint, list_options
from offplan.planner.passes import PassBounds
from offplan.planner.problem import Problem
from offplan.planner.relaxation import (
    Frame,
    Part,
    Turn,
    fill,
    least_frame,
    strongest,
    weighings,
)
from offplan.planner.slots import Slots
from offplan.planner.space import PREFETCH_STEPS, list_backends
from offplan.planner.targets import NEVER, Cut, Goal, Time


class Combination(NamedTuple):
    """Classes with their backends, a ring and a setting; sorted by its bound."""

    bound: Time
    """No plan of it has a lower value."""
    options: tuple[int, ...]
    """By number."""
    backends: tuple[Backends, ...]
    num_slots: int
    setting: int
    turn: int
    """What decode does with the ring: a number of TURNS."""


class Candidate(NamedTuple):
    """A plan of a combination; sorted by its bound."""

    bound: Time
    decode_ps: float
    """No less than this."""
    groups: tuple[int, ...]
    """A group of each option, by number."""


TURNS = tuple(Turn)


@dataclass(frozen=True)
class Combinations:
    """All combinations of one problem."""

    problem: Problem
    classes: tuple[PricedClass, ...]
    _contexts: dict[tuple[tuple[int, ...], int, Turn, Goal], Context] = field(default_factory=dict)
    _columns: dict[tuple[object, ...], Column] = field(default_factory=dict)
    _disjoint: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """What rules can take."""
        return list_options(self.classes)

    @cached_property
    def slots(self) -> Slots:
        """What the ring's slots hold."""
        return Slots(self.options, self.problem.layers_of_kind)

    def bounds(self, num_rules: int, goal: Goal, limit: Time) -> Iterator[Combination]:
        """List the combinations that may hold a plan better than ``limit``."""
        cuts, problem = goal.cuts(limit), self.problem
        least = [goal.value(*problem.resident_ps(setting)) for setting in problem.settings]
        open_settings = tuple(
            number
            for number, setting in enumerate(problem.settings)
            if least[number] < limit and problem.may_fit(setting)
        )
        if not open_settings:
            return
        for number, turn in enumerate(TURNS):
            for num_slots in (0, 1) if turn is Turn.KEEPS else PREFETCH_STEPS:
                context = self.context(open_settings, num_slots, turn, goal)
                # by the byte, one ring is as good as another where decode keeps what it finds
                alike = PREFETCH_STEPS if turn is Turn.KEEPS and num_slots else (num_slots,)
                for options, backends in self._choose(context, num_rules, cuts):
                    for setting, bound in self._split(options, backends, context, goal, cuts):
                        bound = max(bound, least[setting])
                        for slots in alike:
                            yield Combination(bound, options, backends, slots, setting, number)

    def _split(
        self,
        options: tuple[int, ...],
        backends: tuple[Backends, ...],
        context: Context,
        goal: Goal,
        cuts: Sequence[Cut],
    ) -> Iterator[tuple[int, Time]]:
        """Bound a combination in each of a context's settings, as long as several may do."""
        found = context.relax(options, backends, cuts)
        if found is None:
            return
        settings = context.settings
        if len(settings) == 1:
            yield settings[0], goal.bound(strongest(found, len(cuts)))
            return
        middle = len(settings) // 4 * 2 or 1  # the places of the embedding stay together
        for half in (settings[:middle], settings[middle:]):
            within = self.context(half, context.num_slots, context.turn, goal)
            yield from self._split(options, backends, within, goal, cuts)

    def context(self, settings: tuple[int, ...], num_slots: int, turn: Turn, goal: Goal) -> Context:
        """What holds for all combinations of a ring, and of one setting or several."""
        key = (settings, num_slots, turn, goal)
        found = self._contexts.get(key)
        if found is None:
            each = [self._frames(setting, num_slots, turn) for setting in settings]
            prompts, steps = zip(*each, strict=True)
            frames = least_frame(prompts), least_frame(steps)
            weighed = tuple(weighings(goal.cuts(NEVER), *frames))
            lacking = min(self.problem.settings[setting].lacking_bytes for setting in settings)
            found = self._contexts[key] = Context(
                options=self.options,
                settings=settings,
                lacking_bytes=lacking,
                num_slots=num_slots,
                turn=turn,
                frames=frames,
                weighings=weighed,
                start_ps=self.passes.start_ps,
                copy_rate=self.problem.machine.h2d.value,
                _columns=self._columns,
            )
        return found

    def _frames(self, setting: int, num_slots: int, turn: Turn) -> tuple[Frame, Frame]:
        slowdown, chosen = self.passes.slowdown, self.problem.settings[setting]
        slack_ps, turns = self.passes.slack_ps[setting], turn is Turn.TURNS
        link_ps = chosen.prefill.outside_ps
        if num_slots == 1 and turn is not Turn.KEEPS:
            link_ps -= max(chosen.prefill.layer_ps)  # the last one computes after all copies
        return (
            Frame(
                chosen.row_ps[0] - slack_ps[0],
                chosen.prefill.resident_ps,
                1.0,  # kernels may find nothing left to be copied
                link_ps if num_slots else None,
            ),
            Frame(
                chosen.row_ps[1] - slack_ps[1],
                self.problem.decode.resident_ps,
                slowdown if turns else 1.0,
                0 if turns else None,
            ),
        )

    def _choose(
        self, context: Context, num_rules: int, cuts: Sequence[Cut]
    ) -> Iterator[tuple[tuple[int, ...], tuple[Backends, ...]]]:
        """Choose options and backends that a context does not rule out."""
        backends = [each for each in list_backends(self.problem) if is_possible(each, context)]
        alone = (False, False)
        parts = [
            {each: context.parts(number, each, alone) for each in backends}
            for number in range(len(self.options))
        ]
        mixed = [_mix(each.values()) for each in parts]
        rooms = context.rooms(cuts)
        for options in self._disjoint_options(num_rules):
            each = [(parts[number], mixed[number]) for number in options]
            for chosen in _choose(each, (), context.lacking_bytes, rooms):
                if is_complete(chosen, context):
                    yield options, chosen

    def _disjoint_options(self, num_rules: int) -> list[tuple[int, ...]]:
        """Options whose classes have nothing in common, that of the most bytes first."""
        found = self._disjoint.get(num_rules)
        if found is None:
            sizes = [option.sizes[-1] for option in self.options]
            found = self._disjoint[num_rules] = [
                tuple(sorted(chosen, key=lambda number: -sizes[number]))
                for chosen in combinations(range(len(self.options)), num_rules)
                if are_disjoint([self.options[number] for number in chosen])
            ]
        return found

    def choices(self, combined: Combination, candidate: Candidate) -> tuple[Choice, ...]:
        """The rules of a candidate."""
        options = [self.options[number] for number in combined.options]
        return tuple(
            Choice(option.segment_class, *backends, option.groups[group][1])
            for option, backends, group in zip(
                options, combined.backends, candidate.groups, strict=True
            )
        )

    @cached_property
    def passes(self) -> PassBounds:
        """Bounds single plans."""
        return PassBounds(self.problem)


def list_combinations(problem: Problem) -> Combinations:
    """Prepare the combinations of a problem."""
    return Combinations(problem, price_classes(problem))


def _choose(
    options: Sequence[tuple[dict[Backends, list[Part]], list[list[Part]]]],
    chosen: tuple[Backends, ...],
    needed: int,
    rooms: Sequence[Time],
) -> Iterator[tuple[Backends, ...]]:
    """Choose backends, rule by rule, as long as any of those that follow may do."""
    if len(chosen) == len(options):
        yield chosen
        return
    fixed = [parts[each] for (parts, _), each in zip(options, chosen, strict=False)]
    others = [mixed for _, mixed in options[len(chosen) + 1 :]]
    for backends, own in options[len(chosen)][0].items():
        for number in range(0, len(rooms), 2):  # the other means come later
            taken = [own[number]]
            for each in fixed:
                taken.append(each[number])
            for other in others:
                taken += other[number]
            if fill(taken, needed).least >= rooms[number]:
                break
        else:
            yield from _choose(options, (*chosen, backends), needed, rooms)


def _mix(parts: Iterable[list[Part]]) -> list[list[Part]]:
    """What a rule may take with any backends: of parts as large, the cheapest will do."""
    mixed = []
    for of_weighing in zip(*parts, strict=True):
        cheapest: dict[int, float] = {}
        for rate, _, high in of_weighing:
            cheapest[high] = min(rate, cheapest.get(high, rate))
        mixed.append([(rate, 0, high) for high, rate in cheapest.items()])
    return mixed
