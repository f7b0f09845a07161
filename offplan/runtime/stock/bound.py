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


_skips = [False]


@contextmanager
def skipping_repeats() -> Iterator[None]:
    """Have ``list_blocks`` leave out blocks that take the memory of the one before them.

    For passes without values, of which only the most memory counts.
    """
    _skips.append(True)
    try:
        yield
    finally:
        _skips.pop()


def list_blocks(length: int, size: int) -> Iterator[slice]:
    """Yield blocks of ``size`` elements, the last one with what remains.

    Where repeats are skipped it yields the first two, the second of which runs beside what is left
    of the first, and the last.
    """
    starts = [*range(0, length, size)]
    if _skips[-1] and len(starts) > 3:
        starts = [*starts[:2], starts[-1]]
    for start in starts:
        yield slice(start, min(start + size, length))
