"""Bytes, seconds and rates: parsed and printed here and nowhere else.

Capacity is printed in GiB (binary), links in GB/s (decimal), as vendors and drivers do.
"""

import re

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
_BINARY = [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", re.IGNORECASE)


def _parse(text: str | int | float, units: dict[str, float] | dict[str, int], what: str) -> float:
    match = _QUANTITY.fullmatch(str(text))
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        example = {"size": "16GiB or 24GB", "rate": "55.4 GB/s", "time": "31 ms"}.get(what, "680 TFLOP/s")
        raise InputError(f"{text!r} is not a {what}: write it as {example}")
    return float(match[1]) * factor


def parse_bytes(text: str | int) -> int:
    """Read a size as people write it (``16GiB``, ``24 GB``, ``4096``), in bytes.

    Raises InputError for anything else.
    """
    return round(_parse(text, _BYTES, "size"))


def parse_rate(text: str | float) -> float:
    """Read a rate such as ``55.4 GB/s``, in bytes per second."""
    return _parse(text, {**_RATES, "": 1}, "rate")


def parse_flops(text: str | float) -> float:
    """Read an arithmetic rate such as ``680 TFLOP/s``, in operations per second."""
    return _parse(text, {**_FLOPS, "": 1}, "arithmetic rate")


def parse_seconds(text: str | float) -> float:
    """Read a duration such as ``31 ms`` (a bare number is seconds), in seconds."""
    return _parse(text, {**_SECONDS, "": 1.0}, "time")


def format_bytes(num_bytes: float) -> str:
    """Print a size for people, three decimals at most: ``15.67 GiB``."""
    for unit, factor in _BINARY:
        if abs(num_bytes) >= factor:
            return f"{_significant(num_bytes / factor)} {unit}"
    return f"{round(num_bytes)} B"


def format_bytes_exact(num_bytes: int) -> str:
    """Print a size so that it reads back to the very same number: ``16 GiB``, ``17179869183 B``."""
    for unit, factor in [*_BINARY, ("GB", 10**9), ("MB", 10**6)]:
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Print a link's or a memory's rate: ``55.4 GB/s``."""
    for unit, factor in (("TB/s", 10**12), ("GB/s", 10**9), ("MB/s", 10**6)):
        if bytes_per_s >= factor:
            return f"{_significant(bytes_per_s / factor)} {unit}"
    return f"{_significant(bytes_per_s)} B/s"


def format_flops(flops_per_s: float) -> str:
    """Print an arithmetic rate: ``680 TFLOP/s``."""
    return f"{_significant(flops_per_s / 10**12)} TFLOP/s"


def format_seconds(seconds: float) -> str:
    """Print a duration: ``31.2 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_significant(seconds / factor)} {unit}"
    return f"{_significant(seconds / 1e-6)} us"


def _significant(value: float) -> str:
    """Print four significant digits, without an exponent or trailing zeros."""
    text = f"{value:.{max(0, 3 - len(str(int(abs(value)))) + 1)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
