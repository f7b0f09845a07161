"""An option of the search: what a rule may take, how it gets there, and numbers of its own.

Memory buys the entries of a cache, by a cost curve. Every layer of the rule has as many as the plan
leaves bytes for, the first layers one more. Any other number is a field of an option, listed once
for each value that may be best.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.backends import Backend
from offplan.plan import Rule
from offplan.planner.classes import SegmentClass
from offplan.planner.space import Space

Ways = list[tuple[Backend, Backend]]
"""Backends that a rule may have in prefill and in decode."""
Steps = Iterator[tuple[str, dict[str, object]]]
"""Steps of a rule's numbers in words, and the keys that each changes."""


class CostCurve(NamedTuple):
    """The costs of a layer by its cache's size, in entries; an array of each for many layers."""

    entry_bytes: Any
    """GPU memory of each entry."""
    fixed_bytes: Any
    """GPU memory that comes with the first."""
    none_ps: Any
    """Picoseconds that a decode step would take without a cache, beyond the option's content."""
    times_ps: NDArray[np.int64]
    """Picoseconds beyond the option's content, [5, sizes + 1]. They are of a prompt's reading and
    its compute, a step's reading and its compute, and the latter in a step that copies.
    None without entries."""
    asked: Any
    """The cache size that each layer must have; 0 for as many as memory is left for."""


class Pieces(NamedTuple):
    """The costs of a layer whose prompts stream what a rule takes piece by piece.

    An array of each for many layers.
    """

    num_pieces: Any
    gpu_bytes: NDArray[np.int64]
    """GPU memory of the slots, and of what chunks keep meanwhile, [settings]: all layers share the
    largest."""
    spared_bytes: NDArray[np.int64]
    """Bytes that prompts spare if no layer streams whole what its pieces are of, [settings]."""
    copy_ps: Any
    """Picoseconds of the copy of one piece."""
    moved_ps: NDArray[np.int64]
    """Part of a prompt's compute in the layer that its pieces take, [settings]."""
    piece_ps: NDArray[np.int64]
    """Picoseconds that a group of chunks computes with each piece, [settings]."""
    num_groups: NDArray[np.int64]
    """Groups of chunks for which the pieces cross, [settings]."""


@dataclass(frozen=True)
class Option:
    """The weights that a rule takes of its pattern's layers, and how they get there."""

    segment_class: SegmentClass
    prefill: Backend
    decode: Backend

    @property
    def order(self) -> tuple[object, ...]:
        """Among equally good plans those of fewer segments come first, then in this order."""
        segments, values = self.segment_class.segments, self.numbers(1, 0).values()
        told = tuple(-1.0 if value is None else float(value) for value in values)
        return len(segments), segments, self.prefill.name, self.decode.name, told

    @property
    def has_curve(self) -> bool:
        """True if it has cost curves: decode is then priced by cache size, and not by content."""
        return False

    @property
    def fills_ring(self) -> bool:
        """True if a prompt streams layers whole, so that decode may find them in the ring."""
        return self.prefill.streams

    @cached_property
    def every_layer(self) -> Rule:
        """The rule that takes the weights of every layer, with one entry of a cache."""
        return self.rule(1, 1)

    def numbers(self, cache_sizes: int, more: int) -> Mapping[str, Any]:
        """Return the rule's own keys; ``more`` of its caches have an entry more."""
        return {}

    def cost_curve(self, space: Space, kind: int) -> CostCurve | None:
        """Return the cost curve of a kind of layer; None if it has none."""
        return None

    def pieces(self, space: Space, kind: int) -> Pieces | None:
        """Return the pieces of a kind of layer; None if prompts stream it whole, or not."""
        return None

    def rule(self, group_size: int, num_in_group: int, cache_sizes: int = 1, more: int = 0) -> Rule:
        """Return the rule of a plan with this pattern."""
        return Rule(
            cpu_offload_params=self.segment_class.segments,
            group_size=group_size,
            num_in_group=num_in_group,
            prefill=self.prefill,
            decode=self.decode,
            **self.numbers(cache_sizes, more),
        )
