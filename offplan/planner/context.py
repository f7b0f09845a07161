"""What combinations of a setting and a ring have in common; their rules, weighed once for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from offplan.costs.timeline import PS_PER_S
from offplan.plan import Backend
from offplan.planner.options import Backends, Option, Rates, Turns
from offplan.planner.relaxation import Filled, Frame, Part, Turn, Weighing, fill
from offplan.planner.targets import NEVER, Cut, Time

Times = tuple[float, ...]
"""As ``Rates``, in their order."""


class Column(NamedTuple):
    """An option's groups, by the bytes that they take."""

    sizes: list[int]
    costs: list[float]
    """Weighed; what the ring may spare is left out."""
    least_costs: list[float]
    """Of each group and all that take more."""
    times: list[Times]
    """Of each group, less what the ring may spare."""
    least_times: list[Times]
    """As ``least_costs``."""
    spared_ps: list[int]
    """Of a decode step's reading, what the ring may spare of each group."""
    excesses: list[float]
    """What a group costs beyond its bytes' price."""
    least_excess: float


@dataclass(frozen=True, eq=False)
class Context:
    """What combinations have in common: settings, a ring and what decode does with it."""

    options: tuple[Option, ...]
    """What rules can take."""
    settings: tuple[int, ...]
    """One, or several: what is a bound for all of them."""
    lacking_bytes: int
    """Of layers' weights that must leave the GPU, the ring's bytes to come on top."""
    num_slots: int
    turn: Turn
    frames: tuple[Frame, Frame]
    """Of the prompt, and of a decode step."""
    weighings: tuple[Weighing, ...]
    start_ps: int
    """Of a copy, beside its bytes."""
    copy_rate: float
    """Bytes of it a second."""
    _columns: dict[tuple[object, ...], Column]
    """Of all contexts: settings may share them."""
    _relaxed: dict[tuple[tuple[int, ...], tuple[Backends, ...]], list[tuple[Filled, Weighing]]] = (
        field(default_factory=dict)
    )
    _parts: dict[tuple[int, Backends, Turns], list[Part]] = field(default_factory=dict)

    def parts(self, number: int, backends: Backends, turns: Turns) -> list[Part]:
        """What a rule may take by the byte, each at least at its rate, for each weighing."""
        key = (number, backends, turns)
        found = self._parts.get(key)
        if found is None:
            option = self.options[number]
            rates = option.rates(backends, self.settings, self.start_ps, turns)
            low, high = 0 if streams(backends) else option.sizes[0], option.sizes[-1]
            if backends[1] is Backend.PREFETCH and self.turn is Turn.OWNS:
                high = min(high, self.num_slots * option.layer_bytes)
            found = self._parts[key] = [
                (weighing.weigh(rates), low, high) for weighing in self.weighings
            ]
        return found

    def relax(
        self, options: tuple[int, ...], backends: tuple[Backends, ...], cuts: Sequence[Cut]
    ) -> list[tuple[Filled, Weighing]] | None:
        """Bounds of a combination by the byte; None where no plan is wanted."""
        found = self._relaxed.get((options, backends))
        if found is not None:
            if any(each.least >= cuts[weighing.cut].most_ps for each, weighing in found):
                return None
            return found
        parts = [
            self.parts(*each)
            for each in zip(options, backends, in_turns(backends, self), strict=True)
        ]
        needed, spared_ps = self.needed(options, backends)
        found = []
        for weighing, *taken in zip(self.weighings, *parts, strict=True):
            filled = fill(taken, needed)
            least = filled.least + weighing.fixed_ps - weighing.rates.prompt_copy * spared_ps
            if least >= cuts[weighing.cut].most_ps:
                return None
            found.append((Filled(least, filled.rate), weighing))
        self._relaxed[options, backends] = found
        return found

    def needed(self, options: Sequence[int], backends: Sequence[Backends]) -> tuple[int, float]:
        """Bytes that must leave the GPU, the ring's on top; what it then spares of the prompt."""
        lacking, num_slots = self.lacking_bytes, self.num_slots
        if self.turn is Turn.KEEPS:
            return lacking, 0.0
        chosen = [self.options[number] for number in options]
        if self.turn is Turn.TURNS:
            # Of n layers over K slots 2 K - n have one of their own: resident in all but name, they
            # count for nothing. For the least n that is still a bound where there are more: what
            # the rest costs at least is convex in the slots that count, all of them make a bound,
            # and so do none, as what fills the ring takes no less than that spares.
            held, layer_bytes = lacking, 0
            for option, (_, step) in zip(chosen, backends, strict=True):
                if step is Backend.PREFETCH:
                    layer_bytes += option.layer_bytes
                else:
                    held -= option.sizes[-1]
            num_users = max(num_slots + 1, -(-held // layer_bytes))
            num_slots -= max(0, 2 * num_slots - num_users)
        slot_bytes = max(
            option.slot_bytes
            for option, each in zip(chosen, backends, strict=True)
            if streams(each)
        )
        ring_bytes = num_slots * slot_bytes
        return lacking + ring_bytes, ring_bytes * PS_PER_S / self.copy_rate

    def rooms(self, cuts: Sequence[Cut]) -> list[Time]:
        """For each weighing, what rules may cost less than."""
        return [cuts[each.cut].most_ps - each.fixed_ps for each in self.weighings]

    def column(
        self,
        number: int,
        backends: Backends,
        turns: Turns,
        weighing: Weighing,
        price: float,
    ) -> Column:
        """Weigh an option's groups, a byte of memory at this price."""
        settings = self.settings if backends[0] is Backend.UVA or turns[0] else ()
        ring = self.num_slots, self.turn, settings
        key = (number, backends, turns, ring, weighing.cut, weighing.rates, price)
        found = self._columns.get(key)
        if found is None:
            option = self.options[number]
            found = self._columns[key] = self._weigh(option, backends, turns, weighing, price)
        return found

    def _weigh(
        self, option: Option, backends: Backends, turns: Turns, weighing: Weighing, price: float
    ) -> Column:
        owns = self.turn is Turn.OWNS and backends[1] is Backend.PREFETCH
        spared = self._spared(option, backends)
        beyond = [
            weighing.weigh(each) - price * kind.unit_bytes
            for kind, each in zip(option.present, spared, strict=True)
        ]
        most, most_beyond = Rates(*map(max, zip(*spared, strict=True))), max(0.0, *beyond)
        prices = option.prices(backends, self.settings, self.start_ps, turns)
        kept = [min(self.num_slots, totals.num_layers) for totals, _ in option.groups]
        costs, excesses = [], []
        for (totals, _), rates, slots in zip(option.groups, prices, kept, strict=True):
            cost = weighing.weigh(rates)
            if owns and totals.num_layers > self.num_slots:
                cost = NEVER
            costs.append(cost - slots * weighing.weigh(most))
            excesses.append(cost - price * totals.unit_bytes - slots * most_beyond)
        columns = [
            [time - slots * each for time, slots in zip(times, kept, strict=True)]
            for times, each in zip(zip(*prices, strict=True), most, strict=True)
        ]
        return Column(
            option.sizes,
            costs,
            _suffix_least(costs),
            list(zip(*columns, strict=True)),
            list(zip(*map(_suffix_least, columns), strict=True)),
            [slots * int(most.step_read) for slots in kept],
            excesses,
            min(excesses),
        )

    def _spared(self, option: Option, backends: Backends) -> list[Rates]:
        """The most that a slot may spare of what a rule takes of a layer, for each kind."""
        if not streams(backends):
            return [Rates(0, 0, 0, 0)] * len(option.present)
        keeps, again = self.turn is Turn.KEEPS, backends[1] is Backend.PREFETCH
        return [
            Rates(
                copied := kind.copy_ps - self.start_ps,
                0,
                copied if again else 0,
                kind.decode_uva_ps if keeps else 0,
            )
            for kind in option.present
        ]


def _suffix_least(values: list[float]) -> list[float]:
    """Of each value and all after it."""
    return list(accumulate(reversed(values), min))[::-1]


def in_turns(backends: Sequence[Backends], context: Context) -> list[Turns]:
    """For each rule and phase, whether to count what its layers compute as the link's time.

    With one slot, copies and the layers that stream take turns. Rules may share the layers: only
    the first rule that streams is sure to add its own.
    """
    if context.num_slots != 1 or context.turn is Turn.KEEPS:
        return [(False, False)] * len(backends)
    found, rest = [], [True, context.turn is Turn.TURNS]
    for each in backends:
        turns = [each[i] is Backend.PREFETCH and rest[i] for i in (0, 1)]
        rest = [rest[i] and not turns[i] for i in (0, 1)]
        found.append((turns[0], turns[1]))
    return found


def is_possible(backends: Backends, context: Context) -> bool:
    """Whether a rule with these backends may be in a combination."""
    if not context.num_slots:
        return not streams(backends)
    return context.turn is not Turn.KEEPS or backends[1] is Backend.UVA


def is_complete(backends: Sequence[Backends], context: Context) -> bool:
    """Whether rules with these backends use the ring as they should."""
    if not context.num_slots:
        return True
    owned = any(step is Backend.PREFETCH for _, step in backends)
    kept = any(prompt is not step for prompt, step in backends)
    if context.turn is Turn.TURNS:
        return owned
    return kept and (owned or context.turn is Turn.KEEPS)


def streams(backends: Backends) -> bool:
    """Whether a rule with these backends uses the ring."""
    return Backend.PREFETCH in backends
