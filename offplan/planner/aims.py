"""What the search makes least: values that grow with the time of each phase.

A value is a bound where the times are bounds.
"""

import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from offplan.costs.timeline import PS_PER_S
from offplan.plan import Goal

Floats = NDArray[np.float64]

NEVER = float("inf")
"""The value of a plan that is not wanted at all."""

_ROUNDING = 2 * sys.float_info.epsilon
"""Relative error of a float and a product."""


def limits_ps(goal: Goal) -> tuple[float, float]:
    """Return the most picoseconds of a prompt, and of a decode step, that the goal allows.

    A plan whose seconds read the same as a target's keeps it.
    """
    limits = (goal.max_ttft_s, goal.max_tpot_s)
    ttft, tpot = (NEVER if s is None else s * PS_PER_S * (1 + _ROUNDING) for s in limits)
    return ttft, tpot


@dataclass(frozen=True)
class Fastest:
    """The least time of a request, among plans that keep both limits."""

    weights: tuple[int, float]
    """Weights of prompt and decode step; zeros ask for any plan that keeps the limits."""
    limits_ps: tuple[float, float] = (NEVER, NEVER)

    def values(self, prompt_ps: Floats, step_ps: Floats) -> Floats:
        """Weigh both phases' times, NEVER beyond a limit."""
        kept = (prompt_ps <= self.limits_ps[0]) & (step_ps <= self.limits_ps[1])
        return np.where(kept, self.weights[0] * prompt_ps + self.weights[1] * step_ps, NEVER)

    def exact(self, prompt_ps: int, step_ps: Fraction) -> Fraction:
        """Weigh times that keep the limits, without rounding."""
        return self.weights[0] * prompt_ps + Fraction(self.weights[1]) * step_ps


@dataclass(frozen=True)
class Nearest:
    """How far the worse phase is beyond its limit: 1 for all plans that keep both."""

    limits_ps: tuple[float, float]

    def values(self, prompt_ps: Floats, step_ps: Floats) -> Floats:
        """Divide each time by its limit; a limit of nothing is as far away as a picosecond."""
        first, second = (max(1.0, limit) for limit in self.limits_ps)
        return np.maximum(1.0, np.maximum(prompt_ps / first, step_ps / second))

    def exact(self, prompt_ps: int, step_ps: Fraction) -> Fraction:
        """Do the same for one plan, without rounding."""
        times = Fraction(prompt_ps), step_ps
        pairs = zip(times, self.limits_ps, strict=True)
        return max([Fraction(1), *(t / Fraction(max(1.0, s)) for t, s in pairs if s != NEVER)])


WITHIN = 1 + sys.float_info.epsilon
"""The least float above the value that ``Nearest`` gives plans that keep both limits."""

Aim = Fastest | Nearest
