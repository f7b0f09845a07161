"""What the slots of a ring hold: more where rules share layers; a prompt's last ones are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from offplan.planner.options import Option
from offplan.planner.problem import KindCosts


class SharedSlot(NamedTuple):
    """What a slot holds at least if a rule and some before it stream the same layer of a kind."""

    num_bytes: int
    layers: int
    """Of the kind, as bits."""
    before: tuple[int, ...]
    """Those rules, by their place in the combination."""


@dataclass(frozen=True)
class Slots:
    """Sizes of slots, by what rules stream through them."""

    options: tuple[Option, ...]
    layers_of_kind: tuple[int, ...]
    """As bits."""
    _shared: dict[tuple[tuple[int | None, ...], int], list[SharedSlot]] = field(
        default_factory=dict
    )

    def shared(self, before: tuple[int | None, ...], option: int) -> list[SharedSlot]:
        """Sizes where a rule of an option streams, the largest first.

        ``before`` are the options of the rules before it; None where they do not stream.
        """
        found = self._shared.get((before, option))
        if found is None:
            costs = {rule: self.options[n].costs for rule, n in enumerate(before) if n is not None}
            own = self.options[option].costs
            found = self._shared[before, option] = sorted(
                (
                    SharedSlot(
                        own[kind].slab_bytes + sum(costs[rule][kind].slab_bytes for rule in rules),
                        layers,
                        rules,
                    )
                    for number in range(len(costs) + 1)
                    for rules in combinations(costs, number)
                    for kind, layers in enumerate(self.layers_of_kind)
                ),
                reverse=True,
            )
        return found


def kept_ps(
    streamed: Sequence[tuple[int, Sequence[KindCosts]]], kind_of: Sequence[int], num_slots: int
) -> int:
    """What a decode step that streams nothing need not read in place: it finds it in the ring.

    That holds the last layers that a prompt streams, in each slot all that rules take of one. Of
    each rule that streams, ``streamed`` are its layers, as bits, and its costs of each kind of
    layer. Those that further rules stream can only leave fewer slots to these rules' layers.
    """
    users = found_ps = 0
    for layers, _ in streamed:
        users |= layers
    for _ in range(num_slots):
        if not users:
            break
        last = users.bit_length() - 1
        users ^= 1 << last
        kind = kind_of[last]
        for layers, costs in streamed:
            if layers >> last & 1:
                found_ps += costs[kind].decode_uva_ps
    return found_ps
