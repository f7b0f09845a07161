"""The link's curve by size, and the line that plans are priced by."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field
from typing_extensions import TypeAliasType

from offplan.records import Bytes, Rate, Record

FIT_FROM_BYTES = 2**20
"""Bytes of the smallest copy that the line is fitted to. Plans stream larger copies: one projection
of a small model has 2 MiB. A smaller copy takes a few microseconds more than the line says."""


MAX_FACTOR = 1e6
"""Most often that a weight may cross in one product, far past any kernel's."""


class CopyRate(Record):
    """The rate of copies of one size."""

    bytes: Bytes = Field(gt=0)
    rate: Annotated[Rate, Field(ge=1)]
    """Bytes over the median time of a copy, all that one costs included."""
    spread: float | None = Field(None, ge=0)
    """(largest - smallest) / median of the times."""

    @property
    def seconds(self) -> float:
        """Time of one copy."""
        return self.bytes / self.rate


class Reread(Record):
    """The times that a weight read in place crosses the link in a product with so many rows."""

    rows: int = Field(ge=1, le=2**40)
    factor: float = Field(ge=1, le=MAX_FACTOR)


def _check_curve(curve: tuple[CopyRate, ...]) -> tuple[CopyRate, ...]:
    if any(a.bytes >= b.bytes for a, b in pairwise(curve)):
        raise ValueError("the sizes of a curve must increase")
    return curve


def _check_rereads(points: tuple[Reread, ...]) -> tuple[Reread, ...]:
    # the planner counts on more rows never reading less
    if any(a.rows >= b.rows or a.factor > b.factor for a, b in pairwise(points)):
        raise ValueError("rows must increase, and factors must not decrease")
    return points


Curve = TypeAliasType(
    "Curve",
    Annotated[tuple[CopyRate, ...], Field(min_length=1), AfterValidator(_check_curve)],
)
"""The points by increasing size."""
Rereads = TypeAliasType(
    "Rereads",
    Annotated[tuple[Reread, ...], Field(min_length=2), AfterValidator(_check_rereads)],
)
"""The points by increasing rows."""


class Fit(NamedTuple):
    """A line: a copy of n bytes takes ``latency_s`` + n / rate."""

    latency_s: float
    largest_error: float
    """Largest |line - measured| / measured over the sizes that it was fitted to."""


def fit_latency(curve: Sequence[CopyRate], bytes_per_s: float) -> Fit:
    """Find the latency whose largest relative error over the curve is least, at a given rate.

    Only sizes from ``FIT_FROM_BYTES`` on count, where there are any. The planner's bounds rest on a
    line: two copies cost as much as one of both sizes and a latency more. A measured curve with its
    noise is no line. So plans are priced by the line, and the curve shows how far it is off.

    The error at size i is |latency - d_i| / t_i, where d_i is the time t_i less bytes over rate. It
    is convex in the latency, so the best one is 0 or where two sizes err alike on opposite sides.
    """
    points = [point for point in curve if point.bytes >= FIT_FROM_BYTES] or list(curve)
    left = [(point.seconds - point.bytes / bytes_per_s, point.seconds) for point in points]

    def error(latency_s: float) -> float:
        return max(abs(latency_s - rest) / seconds for rest, seconds in left)

    candidates = {0.0}
    for (rest_a, seconds_a), (rest_b, seconds_b) in product(left, repeat=2):
        crossing = (rest_a * seconds_b + rest_b * seconds_a) / (seconds_a + seconds_b)
        candidates.add(max(0.0, crossing))
    best = min(candidates, key=lambda latency_s: (error(latency_s), latency_s))
    return Fit(best, error(best))
