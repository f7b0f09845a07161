"""Candidates: plans of up to two rules as the search counts them, by numbers, in arrays."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Columns = TypeVar("Columns", bound=NamedTuple)

NO_RULE = -1
"""Stands for a rule that a candidate does not have, and for its pattern."""


class Candidates(NamedTuple):
    """Plans of up to two rules: arrays of one number for each candidate."""

    setting: Ints
    prefetch_step: Ints
    first: Ints
    """The option of the first rule, by number."""
    first_pattern: Ints
    second: Ints
    second_pattern: Ints


def choose(columns: Columns, *rows: NDArray[Any]) -> Columns:
    """Keep some rows of every column."""
    return columns._make(column[rows] for column in columns)


def count_on(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """List so many numbers from each start on; returns the start's row of each, and the number."""
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return row, starts[row] + np.arange(len(row)) - before[row]
