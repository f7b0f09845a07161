"""Which cases of a test are in the quick tier, ``pytest -m 'not slow'``, and which in the sweep."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def first_quick(values: Iterable[Any]) -> list[Any]:
    """Mark all cases but the first as slow: the first alone touches what the test is about."""
    first, *others = values
    # a named tuple is one value
    named = (each if type(each) is tuple else (each,) for each in others)
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in named)]


def choose_each_value_once(cases: Sequence[tuple[Any, ...]]) -> list[int]:
    """Number some cases that together have every value of every parameter.

    The next one is that with most values that none so far has, and of equals the first. So of a
    product about as many are chosen as its longest parameter has values.
    """
    missing = [[*each] for each in zip(*cases, strict=True)]
    chosen: set[int] = set()

    def count_missing(number: int) -> int:
        return sum(value in left for value, left in zip(cases[number], missing, strict=True))

    while any(missing):
        best = max(range(len(cases)), key=count_missing)
        chosen.add(best)
        pairs = zip(missing, cases[best], strict=True)
        missing = [[each for each in left if each != value] for left, value in pairs]
    return sorted(chosen)


def others_in_sweep(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Leave in CI the cases that are ``kept``, and the others to the sweep."""
    listed = [*cases]
    unknown = [case for case in kept if case not in listed]
    assert not unknown, f"no cases: {unknown}"
    named = (each if type(each) is tuple else (each,) for each in listed)
    return [
        pytest.param(*each, marks=[] if case in kept else pytest.mark.sweep)
        for case, each in zip(listed, named, strict=True)
    ]


def each_value_once(
    cases: Iterable[tuple[Any, ...]], of: Collection[tuple[Any, ...]] | None = None
) -> list[Any]:
    """Leave in CI cases that have every value of every parameter, and the others to the sweep.

    Where only some of the values are to be there, ``of`` has the cases to choose from.
    """
    listed = [*cases]
    choices = listed if of is None else [*of]
    return others_in_sweep(listed, [choices[number] for number in choose_each_value_once(choices)])
