"""Group patterns: the layer sets that ``group_size`` and ``num_in_group`` can say."""

from typing import NamedTuple


class Pattern(NamedTuple):
    """Of every ``group_size`` layers the last ``num_in_group``."""

    group_size: int
    num_in_group: int
    layers: int
    """The layers it selects, as bits."""


def group_patterns(num_layers: int) -> tuple[Pattern, ...]:
    """List the patterns over ``num_layers`` layers.

    A group larger than the model selects a tail that a group of the model's size selects as well.
    """
    everything = (1 << num_layers) - 1
    patterns = []
    for size in range(1, num_layers + 1):
        repeat = sum(1 << start for start in range(0, num_layers, size))
        for number in range(1, size + 1):
            group = ((1 << number) - 1) << (size - number)
            patterns.append(Pattern(size, number, repeat * group & everything))
    return tuple(patterns)


def distinct_patterns(patterns: tuple[Pattern, ...], among: int) -> tuple[Pattern, ...]:
    """Keep the first pattern of each set of layers that differ ``among`` these layers (as bits)."""
    distinct: dict[int, Pattern] = {}
    for pattern in patterns:
        selected = pattern.layers & among
        if selected and selected not in distinct:
            distinct[selected] = Pattern(pattern.group_size, pattern.num_in_group, selected)
    return tuple(distinct.values())
