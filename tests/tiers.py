"""Which cases of a test are in the quick tier, ``pytest -m 'not slow'``."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(values: Iterable[Any]) -> list[Any]:
    """Mark all cases but the first as slow: the first alone touches what the test is about."""
    first, *others = values
    # a named tuple is one value
    named = (each if type(each) is tuple else (each,) for each in others)
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in named)]
