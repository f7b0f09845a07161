"""Bytes, seconds and rates: parsed and printed here and nowhere else.

Capacity is printed in GiB (binary), links in GB/s (decimal), as vendors and drivers do.
"""

import itertools
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal

from offplan.errors import InputError

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = {**_BINARY, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_FLOPS = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SHORT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Sizes of one letter are binary. Source: ``docker run --memory`` and systemd's ``MemoryMax``."""
_LIMIT = Decimal(2**63)
"""Nothing that is measured here reaches it."""
_NUMBER = "[0-9]+(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?"


class Quantity:
    """One kind of quantity: how people write it."""

    def __init__(
        self, what: str, units: Mapping[str, float], example: str, guesses: Mapping[str, float]
    ) -> None:
        """Name the kind and its units, whose case does not matter.

        ``guesses`` are the units that a bare number probably has, each with the first number that
        is too large for it.
        """
        self.name = what.title().replace(" ", "")
        """Its name among a JSON schema's definitions: ``ArithmeticRate``."""
        self.described = f"{what.capitalize()}, written as {example}"
        self.pattern = rf"^\s*(?:({_NUMBER})\s*({'|'.join(map(_any_case, units))})|0)\s*$"
        """A regular expression of the texts that are read; Python and JSON schemas agree on it."""
        self._what, self._example, self._guesses = what, example, guesses
        self._factors = {unit.lower(): Decimal(str(factor)) for unit, factor in units.items()}

    def parse(self, written: str | float) -> Decimal:
        """Read a text with its unit, or a number, which is in base units.

        Raises InputError, which guesses the unit where a text has none.
        """
        text = str(written)
        is_number = isinstance(written, (int, float)) and not isinstance(written, bool)
        bare = re.fullmatch(_NUMBER, text.strip())
        found = re.match(self.pattern, text)
        value = _LIMIT
        with suppress(ArithmeticError):  # beyond what Decimal can hold
            if bare is not None and (is_number or found is not None):
                value = Decimal(text)
            elif found is not None:
                value = Decimal(found[1]) * self._factors[found[2].lower()]
            elif bare is not None:
                unit = next(unit for unit, most in self._guesses.items() if Decimal(text) < most)
                raise InputError(
                    f"{reprlib.repr(text)} has no unit: is {reprlib.repr(text.strip())[1:-1]}{unit}"
                    f" meant? A {self._what} is written as {self._example}"
                )
        if value >= _LIMIT:
            raise InputError(
                f"{reprlib.repr(written)} is not a {self._what}: write it as {self._example}"
            )
        return value


def _any_case(unit: str) -> str:
    """Return a regular expression of a unit, for dialects that cannot ignore case as a whole."""
    return "".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in unit)


_MORE = math.inf
SIZE = Quantity(
    "size", {**_BYTES, **_SHORT}, "16GiB or 24GB", {"GiB": 2**10, "MiB": 2**20, "B": _MORE}
)
RATE = Quantity("rate", _BYTE_RATES, "55.4 GB/s", {"GB/s": 10**5, "B/s": _MORE})
ARITHMETIC_RATE = Quantity("arithmetic rate", _FLOPS, "680 TFLOP/s", {"TFLOP/s": _MORE})
TIME = Quantity("time", _SECONDS, "31 ms", {"s": 5, "ms": _MORE})


def parse_bytes(written: str | int) -> int:
    """Read a size as people write it (``16GiB``, ``24 GB``, ``8g``), in bytes.

    Raises InputError for anything else, and for a text that is a bare number.
    """
    return round(SIZE.parse(written))


def parse_rate(written: str | float) -> float:
    """Read a rate such as ``55.4 GB/s``, in bytes per second."""
    return float(RATE.parse(written))


def parse_flops(written: str | float) -> float:
    """Read an arithmetic rate such as ``680 TFLOP/s``, in operations per second."""
    return float(ARITHMETIC_RATE.parse(written))


def parse_seconds(written: str | float) -> float:
    """Read a duration such as ``31 ms``, in seconds."""
    return float(TIME.parse(written))


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
    """Print a size so that it reads back to the very same number: ``16 GiB``, ``17179869183 B``.

    It is printed as people would type it: in the unit that needs the fewest characters.
    """
    written = [f"{num_bytes} B"]
    for unit, factor in _BYTES.items():
        if num_bytes >= factor > 1:
            number = f"{num_bytes / factor:.3f}".rstrip("0").rstrip(".")
            written.append(f"{number} {unit}")
    return min((text for text in written if parse_bytes(text) == num_bytes), key=len)


def format_budget(num_bytes: int) -> str:
    """Print a budget as it was typed, or in four digits where nobody would type it."""
    exact = format_bytes_exact(num_bytes)
    return format_bytes(num_bytes) if exact.endswith(" B") else exact


def format_rate(bytes_per_s: float) -> str:
    """Print a link's or a memory's rate: ``55.4 GB/s``."""
    return _format(bytes_per_s, {"B/s": 1, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12})


def format_frequency(per_s: float) -> str:
    """Print how many there are of something in a second, four significant digits: ``31.82``."""
    return _format(per_s, {"": 1}).strip()


def format_flops(flops_per_s: float) -> str:
    """Print an arithmetic rate: ``680 TFLOP/s``."""
    return _format(flops_per_s, {"TFLOP/s": 1e12})


def format_seconds(seconds: float) -> str:
    """Print a duration: ``31.2 ms``."""
    return _format(seconds, _SECONDS)


def format_range(low: float, high: float, print_number: Callable[[float], str]) -> str:
    """Print a range whose ends have two significant digits: ``5.6 to 7.8 ms``."""
    least, most = (print_number(float(f"{number:.2g}")) for number in (low, high))
    if least == most:
        return least
    (number, _, unit), (_, _, same) = least.partition(" "), most.partition(" ")
    return f"{number if unit == same else least} to {most}"


def format_about(per_s: float) -> str:
    """Print an estimate of how many there are in a second, as precise as a range: ``32``."""
    return format_frequency(float(f"{per_s:.2g}"))


def format_about_seconds(seconds: float) -> str:
    """Print an estimated duration as precise as a range: ``32 ms``."""
    return format_seconds(float(f"{seconds:.2g}"))


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
