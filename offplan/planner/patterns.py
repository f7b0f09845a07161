"""Group patterns: the layer sets that ``group_size`` and ``num_in_group`` can say."""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Patterns(NamedTuple):
    """Patterns over the layers of a model; a row each, the smallest groups first."""

    group_size: NDArray[np.int64]
    num_in_group: NDArray[np.int64]
    layers: NDArray[np.bool_]
    """True if the pattern selects a layer, [patterns, layers]."""


class PatternGroup(NamedTuple):
    """Patterns that take as many layers of each kind: they cost the same memory."""

    counts: tuple[int, ...]
    """Layers of each kind."""
    patterns: tuple[int, ...]
    """The patterns by number; the first has the smallest groups, so it spreads most evenly."""


@cache
def list_patterns(num_layers: int) -> Patterns:
    """List the patterns: of every ``group_size`` layers the last ``num_in_group``.

    A group larger than the model selects a tail that a group of the model's size selects as well.
    """
    pairs = [(size, n) for size in range(1, num_layers + 1) for n in range(1, size + 1)]
    sizes, numbers = np.array(pairs, dtype=np.int64).T
    remainders = np.arange(num_layers) % sizes[:, None]
    return Patterns(sizes, numbers, remainders >= (sizes - numbers)[:, None])


@cache
def group_patterns(kind_of: tuple[int, ...], kinds: frozenset[int]) -> tuple[PatternGroup, ...]:
    """Group the patterns that differ in the layers they select among those of some ``kinds``.

    ``kind_of`` is the kind of each layer, by number. Of patterns that select the same such layers
    only the first counts; those that select none are left out.
    """
    of_kind = np.array(kind_of)[:, None] == np.arange(max(kind_of) + 1)
    of_kind[:, [kind for kind in range(of_kind.shape[1]) if kind not in kinds]] = False
    selected = list_patterns(len(kind_of)).layers & of_kind.any(axis=1)
    counts = (selected.astype(np.int64) @ of_kind).tolist()
    firsts = np.unique(np.packbits(selected, axis=1), axis=0, return_index=True)[1]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number in sorted(firsts.tolist()):
        if any(counts[number]):
            groups.setdefault(tuple(counts[number]), []).append(number)
    return tuple(PatternGroup(counts, tuple(numbers)) for counts, numbers in groups.items())
