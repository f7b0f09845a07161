"""A number of a prediction, with its formula and what goes into it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offplan.backends import Figure
from offplan.machine.profile import MachineProfile

UnitName = Literal["bytes", "s", "bytes_per_s", "flops_per_s", "count"]

_FIGURES: Mapping[str, UnitName] = {
    "gpu_overhead": "bytes",
    "copy_latency": "s",
    "layer_overhead": "s",
    "h2d": "bytes_per_s",
    "hbm": "bytes_per_s",
    "matmul": "flops_per_s",
    "vector": "flops_per_s",
}
"""Figures of a profile, and their units."""


class Errors(NamedTuple):
    """Measured times as multiples of those estimated, the least and the most."""

    least: float
    most: float


@dataclass(frozen=True)
class Input:
    """A number that goes into a term."""

    name: str
    value: float
    unit: UnitName
    source: str | None = None
    """Source, if it is a figure of the machine; else it follows from model, workload and
    decision."""


@dataclass(frozen=True)
class Term:
    """A number of a prediction."""

    path: str
    """Path in the plan's file, below ``prediction``: ``decode.link``. A term of one stage of a
    pipeline alone has the stage before it: ``stages.0.decode.link``."""
    value: float
    unit: UnitName
    formula: str
    """Formula over the inputs and other terms of the same section, by their names."""
    inputs: tuple[Input, ...] = ()


def list_sizes(num_bytes: Mapping[str, int]) -> tuple[Input, ...]:
    """List sizes, in bytes, by their names."""
    return tuple(Input(name, value, "bytes") for name, value in num_bytes.items())


def list_figures(machine: MachineProfile, *names: str) -> tuple[Input, ...]:
    """List figures of the machine, each with its basis and source."""
    return tuple(show_figure(name, getattr(machine, name), _FIGURES[name]) for name in names)


def show_figure(name: str, figure: Figure, unit: UnitName) -> Input:
    """Return a figure by its name, with its basis and source."""
    return Input(name, figure.value, unit, f"{figure.basis}: {figure.source}")


def sum_up(path: str, parts: Mapping[str, int]) -> Term:
    """Sum up sizes in bytes; negative ones are taken off, and those of 0 bytes are not named."""
    first, *others = {name: size for name, size in parts.items() if size} or [*parts][:1]
    formula = first + "".join(f" {'+-'[parts[name] < 0]} {name}" for name in others)
    named = {name: abs(parts[name]) for name in (first, *others)}
    return Term(path, sum(parts.values()), "bytes", formula, list_sizes(named))


def least_that(holds: Callable[[int], bool], low: int, high: int, step: int = 1) -> int:
    """Return a number that holds and is at most ``step`` above one that does not.

    ``low`` does not hold, ``high`` does, and what lies above a number that holds does too.
    """
    while high - low > max(1, step):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
