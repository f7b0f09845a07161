"""Aims of the search: values to make least, which grow with the time of each phase.

A value is a bound where the times are bounds.
"""

import sys
from dataclasses import dataclass, replace

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

    def loosened(self, more_ps: int) -> "Fastest":
        """Return the same with limits so much later, for estimates that rounding made longer."""
        return replace(self, limits_ps=(self.limits_ps[0] + more_ps, self.limits_ps[1] + more_ps))

    tolerance = 0.0


@dataclass(frozen=True)
class Balanced:
    """The least product of first token and step, among plans that take hardly more time in all.

    A percent of the one is worth a percent of the other: where prompts are most of a request, what
    is hardly more in all may be a fifth of each step.
    """

    fastest: Fastest
    most: float
    """The largest value of ``fastest`` that is as good as the least."""
    tolerance = 0.01

    def values(self, prompt_ps: Floats, step_ps: Floats) -> Floats:
        """Multiply both phases' times, NEVER for what takes too long in all."""
        is_fast = self.fastest.values(prompt_ps, step_ps) <= self.most
        return np.where(is_fast, prompt_ps * step_ps, NEVER)

    def loosened(self, more_ps: int) -> "Balanced":
        """Return the same with ``Fastest.loosened``."""
        return replace(self, fastest=self.fastest.loosened(more_ps))


@dataclass(frozen=True)
class Nearest:
    """The excess of the worse phase over its limit: 1 for all plans that keep both."""

    limits_ps: tuple[float, float]

    def values(self, prompt_ps: Floats, step_ps: Floats) -> Floats:
        """Divide each time by its limit; a limit of nothing is as far away as a picosecond."""
        first, second = (max(1.0, limit) for limit in self.limits_ps)
        return np.maximum(1.0, np.maximum(prompt_ps / first, step_ps / second))

    def loosened(self, more_ps: int) -> "Nearest":
        """Return the same: no plan is beyond a limit for good."""
        return self

    tolerance = 0.0


WITHIN = 1 + sys.float_info.epsilon
"""The least float above the value that ``Nearest`` gives plans that keep both limits."""

Aim = Fastest | Balanced | Nearest


def value_of(times_ps: tuple[float, float], aim: Aim) -> float:
    """Return the value of one plan, given the picoseconds of its prompt and of a decode step."""
    return float(aim.values(*np.array(times_ps).reshape(2, 1))[0])
