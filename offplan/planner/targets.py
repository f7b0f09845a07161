"""What a plan is to keep, and what the search makes least: both grow with each phase's time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from offplan.costs.timeline import PS_PER_S
from offplan.units import format_seconds

_ROUNDING = 2 * sys.float_info.epsilon
"""Of a float and a product, relative."""

Time = int | float | Fraction
"""Picoseconds: whole for a prompt, a fraction for a steady step, a float for a bound."""

NEVER = float("inf")
"""The value of a plan that is not wanted at all."""


@dataclass(frozen=True)
class Targets:
    """Times that a plan must keep; None where any will do."""

    max_ttft_s: float | None = None
    """Of the prompt, to the first token."""
    max_tpot_s: float | None = None
    """Of a decode step."""

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return (self.max_ttft_s, self.max_tpot_s) != (None, None)

    def __str__(self) -> str:
        named = (("--max-ttft", self.max_ttft_s), ("--max-tpot", self.max_tpot_s))
        return " and ".join(f"{name} {format_seconds(s)}" for name, s in named if s is not None)

    @property
    def limits_ps(self) -> tuple[float, float]:
        """Of the prompt, and of a decode step; a plan whose seconds read the same keeps them."""
        limits = (self.max_ttft_s, self.max_tpot_s)
        ttft, tpot = (NEVER if s is None else s * PS_PER_S * (1 + _ROUNDING) for s in limits)
        return ttft, tpot


NO_TARGETS = Targets()
"""Any plan will do."""


class Cut(NamedTuple):
    """That the two phases' times, weighed, are no more than so much."""

    prefill: int
    decode: int
    most_ps: Time


@dataclass(frozen=True)
class Fastest:
    """The least time of a request, among plans that keep both limits."""

    weights: tuple[int, int]
    """Of the prompt, and of a decode step; zeros ask for any plan that keeps the limits."""
    limits_ps: tuple[float, float] = (NEVER, NEVER)

    def value(self, prefill_ps: Time, decode_ps: Time) -> Time:
        """Grows with both times, so it is a bound where they are bounds."""
        if prefill_ps > self.limits_ps[0] or decode_ps > self.limits_ps[1]:
            return NEVER
        return self.weights[0] * prefill_ps + self.weights[1] * decode_ps

    def cuts(self, limit: Time) -> tuple["Cut", ...]:
        """What every plan better than ``limit`` keeps."""
        first, second = self.limits_ps
        kept = (Cut(1, 0, first), Cut(0, 1, second))
        return (Cut(*self.weights, limit), *(cut for cut in kept if cut.most_ps < NEVER))

    def bound(self, least_ps: Sequence[float]) -> Time:
        """No plan is better whose times, weighed as each of the cuts does, are no less."""
        return least_ps[0]


@dataclass(frozen=True)
class Nearest:
    """How far the worse phase is beyond its limit: 1 for all plans that keep both."""

    limits_ps: tuple[float, float]

    def value(self, prefill_ps: Time, decode_ps: Time) -> Time:
        """Grows with both times, so it is a bound where they are bounds."""
        # a limit of nothing is as far away as one of a picosecond
        first, second = (max(1, limit) for limit in self.limits_ps)
        return max(1, prefill_ps / first, decode_ps / second)

    def cuts(self, limit: Time) -> tuple["Cut", ...]:
        """What every plan better than ``limit`` keeps."""
        first, second = (max(1, each) * limit for each in self.limits_ps)
        return (Cut(1, 0, first), Cut(0, 1, second))

    def bound(self, least_ps: Sequence[float]) -> Time:
        """No plan is better whose times, weighed as each of the cuts does, are no less."""
        return self.value(*least_ps)


Goal = Fastest | Nearest
