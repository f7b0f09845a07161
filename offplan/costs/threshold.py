"""The threshold where something begins to hold: found by halving."""

from collections.abc import Callable


def least_that(holds: Callable[[int], bool], low: int, high: int, step: int = 1) -> int:
    """Return a number that holds and is at most ``step`` above one that does not.

    ``low`` does not hold, ``high`` does, and what lies above a number that holds does too.
    """
    while high - low > max(1, step):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
