"""Which experts of a layer lie in slots where cores and link divide what steps miss, in a list."""

from collections import Counter
from collections.abc import Iterable

from offplan.capabilities.cached_experts import ExpertSlots


class DividedSlots:
    """Keeps a layer's order of use and the experts in its slots; counts what steps find.

    All experts that a step chooses move to the front of the order, as in ``UseOrder``. Of the
    missed ones the host's cores multiply as many as ``ExpertSlots.divide`` says, those used longest
    ago: the last in the order that was. Of the one before them they may multiply a part. None of
    these enters a slot. The link brings the others, those used last first, while there are slots
    that no expert of the step has, into the slots of those used longest ago; what finds no slot is
    read in place.
    """

    def __init__(self, slots: ExpertSlots) -> None:
        """Begin with no expert used, and empty slots."""
        self.order = list(range(slots.num_experts))
        """Experts by their last use, the latest first."""
        self.kept: set[int] = set()
        """Experts in slots."""
        self.counts: Counter[str] = Counter()
        """Experts that steps found: ``hits``, ``copied``, ``in_place``, ``whole_by_cores`` and
        ``split``; and the ``chunks`` of these that the cores multiplied."""
        self._slots, self._num_kept = slots, slots.num_kept

    @property
    def by_cores(self) -> float:
        """Experts that the cores multiplied, a part of one as that part."""
        return self._slots.count_by_cores(self.counts["whole_by_cores"], self.counts["chunks"])

    def step(self, chosen: Iterable[int]) -> None:
        """Take the experts that a step chose; one chosen twice counts once."""
        used = set(chosen)
        missed = [expert for expert in self.order if expert in used - self.kept]
        whole_by_cores, chunks = self._slots.divide(len(missed))
        is_split = chunks > 0
        num_brought = len(missed) - whole_by_cores - is_split
        hits = used & self.kept
        copied = missed[: min(num_brought, self._num_kept - len(hits))]
        idle = [expert for expert in self.order if expert in self.kept - used]
        self.counts.update(
            hits=len(hits),
            copied=len(copied),
            in_place=num_brought - len(copied),
            whole_by_cores=whole_by_cores,
            split=is_split,
            chunks=chunks,
        )
        here = hits.union(copied)
        self.kept = here.union(idle[: self._num_kept - len(here)])
        self._move(used)

    def settle(self, tokens: Iterable[Iterable[int]]) -> None:
        """Take the experts that a prompt's last tokens chose, none of which the cores multiply.

        The first experts in the order are then in slots, of those used or there before.
        """
        known = set(self.kept)
        for token in tokens:
            known.update(token := set(token))
            self._move(token)
        self.kept = set([expert for expert in self.order if expert in known][: self._num_kept])

    def _move(self, used: set[int]) -> None:
        self.order.sort(key=lambda expert: expert not in used)  # stable
