"""GPU memory against speed, with one plan among the best ones."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, log10

from offplan.plan import Plan
from offplan.planner.frontier import Point
from offplan.report.answer import print_speed
from offplan.report.pictures.canvas import LINE, Canvas
from offplan.units import format_bytes, format_frequency

_HEIGHT = 150
_EDGE = 7
"""Pixels left above the fastest plan and below the slowest one."""
_LABEL = 0.18
"""Share of the width that a label takes, in narrow windows too."""
_LEAST_DECADES = 0.5
"""The scale of speeds is logarithmic, and covers so many powers of ten at least."""


def draw_frontier(points: Sequence[Point], plan: Plan) -> Canvas:
    """Draw the best plan of each budget, and where ``plan`` stands."""
    canvas = Canvas()
    plans = [*(point.plan for point in points), plan]
    most = max(each.budget.gpu_memory for each in plans)
    rates = sorted(map(find_rate, plans))
    slowest, fastest = rates[0], rates[-1]
    decades = max(_LEAST_DECADES, log10(fastest / slowest))

    def locate(each: Plan) -> tuple[float, float]:
        slower = log10(fastest / find_rate(each)) / decades
        return each.budget.gpu_memory / most, _EDGE + (_HEIGHT - 2 * _EDGE) * slower

    def say(each: Plan) -> str:
        return f"{format_bytes(each.budget.gpu_memory)}: {print_speed(each).rate}"

    lowest = float("-inf")
    for rate in reversed(list_ticks(slowest, fastest)):
        top = _EDGE + (_HEIGHT - 2 * _EDGE) * log10(fastest / rate) / decades
        if top >= lowest + LINE:
            canvas.tick(f"{format_frequency(rate)}{' tokens/s' * (lowest < 0)}", top)
            lowest = top
    for before, after in pairwise(points):
        canvas.line("best", locate(before.plan), locate(after.plan))
    for point in points:
        canvas.dot("best", *locate(point.plan), 3.5, say(point.plan))
    canvas.line("plan", (locate(plan)[0], _HEIGHT), locate(plan))
    canvas.dot("plan", *locate(plan), 6, say(plan))
    canvas.height = _HEIGHT + 2
    free = 2.0
    for each in sorted(plans, key=lambda each: -each.budget.gpu_memory):
        at = locate(each)[0]
        if _LABEL / 2 <= at <= free - _LABEL:
            canvas.label(format_bytes(each.budget.gpu_memory), at)
            free = at - _LABEL / 2 * (at == 1)
    canvas.height += LINE
    named = ("plan", f"this plan, {say(plan)} tokens/s"), ("best", "best plans, tokens/s:")
    canvas.legend(named)
    for row in range(0, len(points), 2):
        for column, point in enumerate(points[row : row + 2]):
            canvas.label(say(point.plan), column / 2, shift=16)
        canvas.height += LINE
    return canvas


def find_rate(plan: Plan) -> float:
    """Return the tokens a second of all sequences, as ``print_speed`` prints them."""
    prediction, workload = plan.prediction, plan.workload
    took = prediction.decode if workload.num_steps else prediction.prefill
    return workload.batch / took.step_s


def list_ticks(least: float, most: float) -> list[float]:
    """List round rates between two: 1, 2 and 5 times the powers of ten, or the ends alone."""
    powers = range(floor(log10(least)), ceil(log10(most)) + 1)
    rates = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [rate for rate in rates if least <= rate <= most] or [least, most]
