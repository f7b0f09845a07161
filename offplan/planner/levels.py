"""What the choice of each rule's group goes by: the same for all plans of one combination."""

from collections.abc import Sequence
from typing import NamedTuple

from offplan.plan import Backend
from offplan.planner.combinations import Combination, Combinations
from offplan.planner.context import Column, Context, Times, in_turns, streams
from offplan.planner.options import Option, Taken, Turns
from offplan.planner.relaxation import Turn, Weighing
from offplan.planner.slots import SharedSlot


class Beside(NamedTuple):
    """What layers that stream take of the link beside their bytes, once for all rules."""

    layers: int
    """As bits."""
    layer_ps: int
    """Of each."""


class Level(NamedTuple):
    """What the choice of one rule's group goes by."""

    option: Option
    taken: Sequence[Taken]
    """By each of its groups."""
    streams: bool
    column: Column
    slots: Sequence[SharedSlot]
    """That it and the rules before it may need; none if it does not stream."""
    beside: tuple[Sequence[Beside], Sequence[Beside]]
    """In a prompt and a decode step, if no other rule streams the layer; none where it is read."""
    spared_ps: Sequence[int]
    """What each group's sums leave out of a decode step's reading; empty if nothing is kept."""
    most_after: int
    """Bytes that the rules after it can take."""
    least_after: int
    """And must take, as each takes something."""
    cost_after: float
    """What they cost at least, and so on."""
    excess_after: float
    times_after: Times

    def larger_slots(self, streamed: Sequence[int], slot_bytes: int) -> list[tuple[int, int]]:
        """Sizes of slots beyond this, the largest first, each with layers that ask for it.

        ``streamed`` are the layers that each rule before it streams, as bits.
        """
        larger = []
        for num_bytes, layers, before in self.slots:
            if num_bytes <= slot_bytes:
                break
            for rule in before:
                layers &= streamed[rule]
            if layers:
                larger.append((num_bytes, layers))
        return larger


def list_levels(
    found: Combinations, combined: Combination, context: Context, weighing: Weighing, price: float
) -> list[Level]:
    """Weigh a combination's rules, a byte of memory at this price."""
    # by rule, those before it; None for one that does not stream
    streamed = tuple(
        number if streams(each) else None
        for number, each in zip(combined.options, combined.backends, strict=True)
    )
    turns, levels = in_turns(combined.backends, context), []
    most, least, cost, excess = 0, 0, 0.0, 0.0
    times: Times = (0, 0, 0, 0)
    for rule in reversed(range(len(streamed))):
        number, backends = combined.options[rule], combined.backends[rule]
        option, is_streamed = found.options[number], streamed[rule] is not None
        column = context.column(number, backends, turns[rule], weighing, price)
        levels.append(
            Level(
                option=option,
                taken=option.taken(backends),
                streams=is_streamed,
                column=column,
                slots=found.slots.shared(streamed[:rule], number) if is_streamed else (),
                beside=_beside(found, combined, context, rule, turns[rule]),
                spared_ps=column.spared_ps if context.turn is Turn.KEEPS and is_streamed else (),
                most_after=most,
                least_after=least,
                cost_after=cost,
                excess_after=excess,
                times_after=times,
            )
        )
        most += column.sizes[-1]
        least += column.sizes[0]
        cost += column.least_costs[0]
        excess += column.least_excess
        times = add(times, column.least_times[0])
    return levels[::-1]


def _beside(
    found: Combinations, combined: Combination, context: Context, rule: int, turns: Turns
) -> tuple[list[Beside], list[Beside]]:
    """Starts of copies; with one slot also compute, unless the rule's sums have it (``turns``)."""
    problem, start_ps = found.problem, context.start_ps
    beside: tuple[list[Beside], list[Beside]] = ([], [])
    priced = problem.settings[combined.setting].prefill, problem.decode
    alternates = context.num_slots == 1 and context.turn is not Turn.KEEPS
    for phase, counted in enumerate((True, context.turn is Turn.TURNS)):
        if not counted or combined.backends[rule][phase] is not Backend.PREFETCH:
            continue
        if not alternates or turns[phase]:
            beside[phase].append(Beside(sum(problem.layers_of_kind), start_ps))
            continue
        for layers in problem.layers_of_kind:
            layer_ps = priced[phase].layer_ps[(layers & -layers).bit_length() - 1]
            beside[phase].append(Beside(layers, start_ps + layer_ps))
    return beside


def add(first: Times, second: Times) -> Times:
    """Add up times of each kind."""
    a, b, c, d = first
    return a + second[0], b + second[1], c + second[2], d + second[3]
