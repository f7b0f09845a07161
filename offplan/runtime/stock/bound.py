"""The bytes that a block of a pass makes at most, where passes run in blocks."""

from collections.abc import Iterator
from contextlib import contextmanager

BOUND_BYTES = 2**28
"""Bytes of scores, or of keys and values, that a block makes at most.

A block has one query and one key at least.
"""
FLOAT32_BYTES = 4

_bound = [BOUND_BYTES]


def bound_bytes() -> int:
    """Return the bytes that a block makes at most."""
    return _bound[-1]


@contextmanager
def bounded_by(num_bytes: int) -> Iterator[None]:
    """Have blocks of other sizes than BOUND_BYTES."""
    _bound.append(num_bytes)
    try:
        yield
    finally:
        _bound.pop()
