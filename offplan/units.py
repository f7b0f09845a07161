"""Bytes, seconds and rates: parsed and printed here and nowhere else.

Capacity is printed in GiB (binary), links in GB/s (decimal), as vendors and drivers do.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from decimal import Decimal

from offplan.errors import InputError

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items() if unit}
_FLOPS = {"gflop/s": 10**9, "tflop/s": 10**12, "pflop/s": 10**15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_EXAMPLES = {
    "size": "16GiB or 24GB",
    "rate": "55.4 GB/s",
    "arithmetic rate": "680 TFLOP/s",
    "time": "31 ms",
}
_BINARY = [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]
_LIMIT = 2**63
"""Nothing that is measured here reaches it."""
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", re.IGNORECASE)


def _parse(text: str | int | float, units: dict[str, int] | dict[str, float], what: str) -> Decimal:
    match = _QUANTITY.fullmatch(str(text))
    factor = units.get(match[2].lower()) if match else None
    value = None
    if match and factor is not None:
        with contextlib.suppress(ArithmeticError):  # beyond what Decimal can hold
            value = Decimal(match[1]) * Decimal(str(factor))
    if value is None or value >= _LIMIT:
        raise InputError(f"{text!r} is not a {what}: write it as {_EXAMPLES[what]}")
    return value


def parse_bytes(text: str | int) -> int:
    """Read a size as people write it (``16GiB``, ``24 GB``, ``4096``), in bytes.

    Raises InputError for anything else.
    """
    return round(_parse(text, _BYTES, "size"))


def parse_rate(text: str | float) -> float:
    """Read a rate such as ``55.4 GB/s``, in bytes per second."""
    return float(_parse(text, {**_RATES, "": 1}, "rate"))


def parse_flops(text: str | float) -> float:
    """Read an arithmetic rate such as ``680 TFLOP/s``, in operations per second."""
    return float(_parse(text, {**_FLOPS, "": 1}, "arithmetic rate"))


def parse_seconds(text: str | float) -> float:
    """Read a duration such as ``31 ms`` (a bare number is seconds), in seconds."""
    return float(_parse(text, {**_SECONDS, "": 1.0}, "time"))


def format_bytes(num_bytes: float) -> str:
    """Print a size for people, four significant digits: ``15.67 GiB``."""
    return _format(num_bytes, [("B", 1.0), *((unit, float(f)) for unit, f in _BINARY[::-1])])


def format_bytes_enough(num_bytes: int) -> str:
    """Print what is needed of a size, rounded up: what is printed is enough."""
    text = format_bytes(num_bytes)
    return text if parse_bytes(text) >= num_bytes else format_bytes(num_bytes * 1.001)


def format_bytes_alike(sizes: Sequence[int]) -> tuple[str, list[str]]:
    """Print a column of sizes in one unit, the largest one's, so that they compare at a glance.

    Returns the unit and the figures: ``("GiB", ["8.938", "0.391"])``.
    """
    largest = max(sizes, default=0)
    unit, factor = next((pair for pair in _BINARY if largest >= pair[1]), ("B", 1))
    num_decimals = 0 if factor == 1 else 3 if largest < 100 * factor else 1
    return unit, [f"{size / factor:,.{num_decimals}f}" for size in sizes]


def format_bytes_exact(num_bytes: int) -> str:
    """Print a size so that it reads back to the very same number: ``16 GiB``, ``17179869183 B``."""
    for unit, factor in [*_BINARY, ("GB", 10**9), ("MB", 10**6)]:
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Print a link's or a memory's rate: ``55.4 GB/s``."""
    return _format(bytes_per_s, [("B/s", 1.0), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12)])


def format_flops(flops_per_s: float) -> str:
    """Print an arithmetic rate: ``680 TFLOP/s``."""
    return _format(flops_per_s, [("TFLOP/s", 1e12)])


def format_seconds(seconds: float) -> str:
    """Print a duration: ``31.2 ms``."""
    return _format(seconds, [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])


def format_seconds_exact(seconds: float) -> str:
    """Print a duration so that it reads back to the same number: ``50 ms``, ``0.0123456 s``."""
    text = format_seconds(seconds)
    return text if parse_seconds(text) == seconds else f"{seconds!r} s"


def _format(value: float, units: list[tuple[str, float]]) -> str:
    """Print four significant digits in the largest unit of which there is at least one.

    The rounded number decides, so that what is printed reads back to what prints the same.
    """
    least = 0.0
    for (unit, factor), (_, following) in itertools.pairwise([*units, ("", math.inf)]):
        rounded = max(least, float(f"{value / factor:.4g}"))
        if rounded < round(following / factor, 3):  # 1e-3 / 1e-6 is a little more than 1000
            return f"{rounded:.4f}".rstrip("0").rstrip(".") + f" {unit}"
        least = 1.0
    raise AssertionError("the last unit takes everything")
