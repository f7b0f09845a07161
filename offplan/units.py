"""Bytes, seconds and rates: parsed and printed here and nowhere else.

Capacity is printed in GiB (binary), links in GB/s (decimal), as vendors and drivers do.
"""

import itertools
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from decimal import Decimal

from offplan.errors import InputError

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = {**_BINARY, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_FLOPS = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LIMIT = Decimal(2**63)
"""Nothing that is measured here reaches it."""
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", re.IGNORECASE)


def _parse(text: str | float, units: Mapping[str, float], what: str, example: str) -> Decimal:
    """Read a number and its unit, whose case does not matter; a bare number is in base units."""
    factors = {"": 1, **{unit.lower(): factor for unit, factor in units.items()}}
    match = _QUANTITY.fullmatch(str(text))
    try:
        value = Decimal(match[1]) * Decimal(str(factors[match[2].lower()])) if match else _LIMIT
    except (KeyError, ArithmeticError):  # another unit, or beyond what Decimal can hold
        value = _LIMIT
    if value >= _LIMIT:
        raise InputError(f"{reprlib.repr(text)} is not a {what}: write it as {example}")
    return value


def parse_bytes(text: str | int) -> int:
    """Read a size as people write it (``16GiB``, ``24 GB``, ``4096``), in bytes.

    Raises InputError for anything else.
    """
    return round(_parse(text, _BYTES, "size", "16GiB or 24GB"))


def parse_rate(text: str | float) -> float:
    """Read a rate such as ``55.4 GB/s``, in bytes per second."""
    return float(_parse(text, _BYTE_RATES, "rate", "55.4 GB/s"))


def parse_flops(text: str | float) -> float:
    """Read an arithmetic rate such as ``680 TFLOP/s``, in operations per second."""
    return float(_parse(text, _FLOPS, "arithmetic rate", "680 TFLOP/s"))


def parse_seconds(text: str | float) -> float:
    """Read a duration such as ``31 ms`` (a bare number is seconds), in seconds."""
    return float(_parse(text, _SECONDS, "time", "31 ms"))


def format_bytes(num_bytes: float) -> str:
    """Print a size for people, four significant digits: ``15.67 GiB``."""
    return _format(num_bytes, _BINARY)


def format_bytes_enough(num_bytes: int) -> str:
    """Print what is needed of a size, rounded up: what is printed is enough."""
    text = format_bytes(num_bytes)
    return text if parse_bytes(text) >= num_bytes else format_bytes(num_bytes * 1.001)


def format_bytes_alike(sizes: Sequence[int]) -> tuple[str, list[str]]:
    """Print a column of sizes in one unit, the largest one's, so that they compare at a glance.

    Returns the unit and the figures: ``("GiB", ["8.938", "0.391"])``.
    """
    largest = max(sizes, default=0)
    unit, factor = [("B", 1), *(each for each in _BINARY.items() if largest >= each[1])][-1]
    num_decimals = 0 if factor == 1 else 3 if largest < 100 * factor else 1
    return unit, [f"{size / factor:,.{num_decimals}f}" for size in sizes]


def format_bytes_exact(num_bytes: int) -> str:
    """Print a size so that it reads back to the very same number: ``16 GiB``, ``17179869183 B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB", "GB", "MB"):
        if num_bytes and num_bytes % _BYTES[unit] == 0:
            return f"{num_bytes // _BYTES[unit]} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Print a link's or a memory's rate: ``55.4 GB/s``."""
    return _format(bytes_per_s, {"B/s": 1, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12})


def format_flops(flops_per_s: float) -> str:
    """Print an arithmetic rate: ``680 TFLOP/s``."""
    return _format(flops_per_s, {"TFLOP/s": 1e12})


def format_seconds(seconds: float) -> str:
    """Print a duration: ``31.2 ms``."""
    return _format(seconds, _SECONDS)


def format_seconds_exact(seconds: float) -> str:
    """Print a duration so that it reads back to the same number: ``50 ms``, ``0.0123456 s``."""
    text = format_seconds(seconds)
    return text if parse_seconds(text) == seconds else f"{seconds!r} s"


def _format(value: float, units: Mapping[str, float]) -> str:
    """Print four significant digits in the largest unit of which there is at least one.

    The rounded number decides, so that what is printed reads back to what prints the same.
    """
    least = 0.0
    for (unit, factor), (_, following) in itertools.pairwise([*units.items(), ("", math.inf)]):
        rounded = max(least, float(f"{value / factor:.4g}"))
        if rounded < round(following / factor, 3):  # 1e-3 / 1e-6 is a little more than 1000
            return f"{rounded:.4f}".rstrip("0").rstrip(".") + f" {unit}"
        least = 1.0
    raise AssertionError("the last unit takes everything")
