"""Weights that stay as they are stored where a plan packs: named by layer, by segment or both."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from offplan.segments import match_segments

OUTPUT_HEAD = "output_head"
"""The name of the output head among them."""


@dataclass(frozen=True)
class Unpacked:
    """Weights that stay as they are stored, by name.

    ``7`` is all of layer 7, ``7.mlp.down_proj`` what a segment matches there. ``mlp.down_proj`` is
    what it matches in all layers, and ``output_head`` the output head.
    """

    names: tuple[str, ...] = ()

    @cached_property
    def _by_layer(self) -> dict[int | None, list[str]]:
        """Segments by layer, and under None those of all layers; an empty one takes the layer."""
        found: dict[int | None, list[str]] = {}
        for name in self.names:
            first, _, rest = name.partition(".")
            key, segment = (int(first), rest) if first.isdecimal() else (None, name)
            if name != OUTPUT_HEAD:
                found.setdefault(key, []).append(segment)
        return found

    def takes(self, layer: int, name: str) -> bool:
        """Return True if a weight stays as it is stored; ``name`` is relative to its layer."""
        return any(
            not segment or match_segments((segment,), name)
            for key in (layer, None)
            for segment in self._by_layer.get(key, ())
        )

    @property
    def takes_head(self) -> bool:
        """True if the output head stays as it is stored."""
        return OUTPUT_HEAD in self.names

    def with_names(self, names: Iterable[str]) -> "Unpacked":
        """Return these weights and others, in the order of layers; nothing is named twice."""
        return Unpacked(tuple(sorted({*self.names, *names}, key=_rank)))


def _rank(name: str) -> tuple[int, int, str]:
    first = name.partition(".")[0]
    return (0, int(first), name) if first.isdecimal() else (1, 0, name)
