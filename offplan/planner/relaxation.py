"""The relaxation behind the bounds of plans of several rules: linear costs, classes by the byte.

A pass takes at least what its compute queue holds, resident compute and all reading in place, and
at least what the link does, all copies and the same reading. That is at least any mean of both,
and both phases weighed are linear in what the rules take (Lagrange's relaxation). Then classes by
the byte are a fractional knapsack, whose cheapest bytes are taken first; the rate of the last byte
taken prices a byte of memory in all plans (its dual).

What the ring spares is no more than what it takes. Where decode does not stream, it reads what the
last K layers stream in prefill from the ring: of the bytes that must leave the GPU, at most the
ring's own are spared. Where it streams, a prompt finds K slots filled: whatever they hold beyond
the least slot makes the ring larger by as much.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from offplan.planner.options import Rates
from offplan.planner.targets import NEVER, Cut

_MEANS = (0.0, 0.5, 1.0)
"""Shares of the link in a mean of link and compute."""


class Turn(Enum):
    """What decode does with the ring."""

    KEEPS = "keeps"
    """It streams nothing, and finds there what prefill left."""
    OWNS = "owns"
    """Layers that stream have slots of their own: nothing is copied."""
    TURNS = "turns"
    """It streams through it."""


class Weighing(NamedTuple):
    """One way to weigh all that rules cost, as one of the goal's cuts does."""

    cut: int
    """By number."""
    rates: Rates
    """Weights of each kind of time."""
    fixed_ps: float
    """Of every plan of a setting and a ring; what the ring spares of the prompt left out."""

    def weigh(self, rates: Rates) -> float:
        """Sum up weighed times."""
        a, b, c, d = self.rates
        return a * rates[0] + b * rates[1] + c * rates[2] + d * rates[3]


class Frame(NamedTuple):
    """Times of a phase that the rules do not change."""

    fixed_ps: float
    resident_ps: float
    slowdown: float
    """Of reading in place."""
    link_ps: float | None
    """What the link is busy with, or waits for, beside what rules stream; None if nothing does."""

    def least_ps(self, copy_ps: float, read_ps: float) -> float:
        """Least time of a phase that copies and reads so long."""
        least = self.resident_ps + self.slowdown * read_ps
        if self.link_ps is not None:
            link_ps = self.link_ps + copy_ps + read_ps
            if link_ps > least:
                least = link_ps
        return self.fixed_ps + least

    def at(self, mean: float) -> float:
        """Time in a mean of both queues."""
        return self.fixed_ps + (1 - mean) * self.resident_ps + mean * (self.link_ps or 0)


def least_frame(frames: Sequence[Frame]) -> Frame:
    """No phase takes less than in any of these; all copy, or none."""
    links = [frame.link_ps for frame in frames if frame.link_ps is not None]
    return Frame(
        min(frame.fixed_ps for frame in frames),
        min(frame.resident_ps for frame in frames),
        min(frame.slowdown for frame in frames),
        min(links, default=None),
    )


def weighings(cuts: Iterable[Cut], prompt: Frame, step: Frame) -> list[Weighing]:
    """Ways to weigh the phases, for each cut."""
    found = []
    for number, (first, second, _) in enumerate(cuts):
        for in_prompt in _means(first, prompt):
            for in_step in _means(second, step):
                rates = Rates(
                    first * in_prompt,
                    first * (in_prompt + (1 - in_prompt) * prompt.slowdown),
                    second * in_step,
                    second * (in_step + (1 - in_step) * step.slowdown),
                )
                fixed_ps = first * prompt.at(in_prompt)
                fixed_ps += second * step.at(in_step)
                found.append(Weighing(number, rates, fixed_ps))
    return found


def _means(weight: int, frame: Frame) -> tuple[float, ...]:
    return _MEANS if weight and frame.link_ps is not None else (0.0,)


Part = tuple[float, int, int]
"""What a rule may take by the byte: the least rate of each, the least and the most bytes."""


class Filled(NamedTuple):
    """The cheapest bytes, until there are enough."""

    least: float
    """What they cost; never, where there are not enough."""
    rate: float
    """Of the last of them."""


def fill(parts: Iterable[Part], needed: int) -> Filled:
    """Take bytes of these parts, the cheapest first."""
    ordered = sorted(parts)
    left, least, last = needed, 0.0, 0.0
    for rate, low, _ in ordered:
        if low:
            left -= low
            least += rate * low
    for rate, low, high in ordered:
        if left <= 0:
            break
        last = rate
        more = high - low
        if more > left:
            more = left
        least += rate * more
        left -= more
    return Filled(NEVER if left > 0 else least, last)


def strongest(found: Sequence[tuple[Filled, Weighing]], num_cuts: int) -> list[float]:
    """The largest bound of each cut."""
    bounds = [-NEVER] * num_cuts
    for filled, weighing in found:
        bounds[weighing.cut] = max(bounds[weighing.cut], filled.least)
    return bounds
