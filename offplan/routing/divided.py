"""Which experts of a layer lie in slots where cores and link divide what steps miss, in a list."""

import math
from collections import Counter
from collections.abc import Iterable


class DividedSlots:
    """Keeps a layer's order of use and the experts in its slots; counts what steps find.

    All experts that a step chooses move to the front of the order, as in ``UseOrder``. Of m missed
    ones the host's cores multiply floor(``host_share`` x m + 1/2), those used longest ago: the last
    in the order that was. They enter no slot. The link brings the others, those used last first,
    while there are slots that no expert of the step has, into the slots of those used longest ago;
    what finds no slot is read in place.
    """

    def __init__(self, num_experts: int, num_slots: int, host_share: float) -> None:
        """Begin with no expert used, and empty slots."""
        self.order = list(range(num_experts))
        """Experts by their last use, the latest first."""
        self.kept: set[int] = set()
        """Experts in slots."""
        self.counts: Counter[str] = Counter()
        """Experts that steps found: ``hits``, ``copied``, ``in_place`` and ``by_cores``."""
        self._num_slots, self._host_share = num_slots, host_share

    def step(self, chosen: Iterable[int]) -> None:
        """Take the experts that a step chose; one chosen twice counts once."""
        used = set(chosen)
        missed = [expert for expert in self.order if expert in used - self.kept]
        num_brought = len(missed) - math.floor(self._host_share * len(missed) + 0.5)
        hits = used & self.kept
        copied = missed[: min(num_brought, self._num_slots - len(hits))]
        idle = [expert for expert in self.order if expert in self.kept - used]
        self.counts.update(
            hits=len(hits),
            copied=len(copied),
            in_place=num_brought - len(copied),
            by_cores=len(missed) - num_brought,
        )
        here = hits.union(copied)
        self.kept = here.union(idle[: self._num_slots - len(here)])
        self._move(used)

    def settle(self, tokens: Iterable[Iterable[int]]) -> None:
        """Take the experts that a prompt's last tokens chose, none of which the cores multiply.

        The first experts in the order are then in slots, of those used or there before.
        """
        known = set(self.kept)
        for token in tokens:
            known.update(token := set(token))
            self._move(token)
        self.kept = set([expert for expert in self.order if expert in known][: self._num_slots])

    def _move(self, used: set[int]) -> None:
        self.order.sort(key=lambda expert: expert not in used)  # stable
