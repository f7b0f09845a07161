"""Which experts of a layer lie in slots where cores and link divide what steps miss, in a list."""

from collections import Counter
from collections.abc import Iterable

from offplan.capabilities.cached_experts import (
    LATER_FADES,
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
    ExpertSlots,
    MissRates,
)


class DividedSlots:
    """Keeps a layer's order of use and the experts in its slots; counts what steps find.

    All experts that a step chooses move to the front of the order, as in ``UseOrder``. Of the
    missed ones the host's cores multiply as many as ``ExpertSlots.divide`` says, those used longest
    ago: the last in the order that was. Of the one before them they may multiply a part. The link
    brings the others, those used last first, while there are slots that no expert of the step has,
    into the slots of those used longest ago; what finds no slot is read in place. Of the split
    expert and the cores' it brings the first ones for later steps, into slots that are then left:
    as many whole ones as ``ExpertSlots.later`` has added up to, MOST_LATER at most, and none for
    LATER_STEPS steps if ``ExpertSlots.brings_later`` says so of as many before.
    """

    def __init__(self, slots: ExpertSlots, rates: MissRates) -> None:
        """Begin with no expert used, and empty slots; ``rates`` are those of the steps to come."""
        self.order = list(range(slots.num_experts))
        """Experts by their last use, the latest first."""
        self.kept: set[int] = set()
        """Experts in slots."""
        self.counts: Counter[str] = Counter()
        """Experts that steps found: ``hits``, ``copied``, ``in_place``, ``whole_by_cores`` and
        ``split``; the ``chunks`` of these that the cores multiplied; and those brought for
        ``later``."""
        self.rates = rates
        self._slots, self._num_kept = slots, slots.num_kept
        self._credit = 0
        self._brings = True
        self._num_steps = 0
        """Steps since it was decided whether any are brought."""
        self._counted = [0, 0]
        """Experts used, and of these those that were among the ``num_kept`` used last: of these
        steps, and what is left of the ones before."""

    @property
    def by_cores(self) -> float:
        """Experts that the cores multiplied, a part of one as that part."""
        return self._slots.count_by_cores(self.counts["whole_by_cores"], self.counts["chunks"])

    def step(self, chosen: Iterable[int]) -> None:
        """Take the experts that a step chose; one chosen twice counts once."""
        used = set(chosen)
        missed = [expert for expert in self.order if expert in used - self.kept]
        whole_by_cores, chunks = self._slots.divide(len(missed), self.rates)
        is_split = chunks > 0
        num_brought = len(missed) - whole_by_cores - is_split
        hits = used & self.kept
        copied = missed[: min(num_brought, self._num_kept - len(hits))]
        idle = [expert for expert in self.order if expert in self.kept - used]
        num_left = self._num_kept - len(hits) - len(copied)
        later = missed[num_brought:][: self._count_later(used, num_left)]
        self.counts.update(
            hits=len(hits),
            copied=len(copied),
            in_place=num_brought - len(copied),
            whole_by_cores=whole_by_cores,
            split=is_split,
            chunks=chunks,
            later=len(later),
        )
        if later:
            self._credit -= len(later) * LATER_PARTS
        here = hits.union(copied, later)
        self.kept = here.union(idle[: self._num_kept - len(here)])
        self._move(used)

    def _count_later(self, used: set[int], num_left: int) -> int:
        """Count the experts that a step may bring, of those that there are."""
        self._credit = min(self._credit + self._slots.later, LATER_PARTS * MOST_LATER)
        may = min(num_left, self._credit // LATER_PARTS) if self._brings else 0
        self._num_steps += 1
        self._counted[0] += len(used)
        self._counted[1] += len(used.intersection(self.order[: self._num_kept]))
        if self._num_steps == LATER_STEPS:
            self._brings = self._slots.brings_later(*self._counted)
            self._counted = [count - count // LATER_FADES for count in self._counted]
            self._num_steps = 0
        return may

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
