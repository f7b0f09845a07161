"""Slots whose missed experts are divided: against the order of use, and by hand."""

import numpy as np
import pytest

from benchmarks.divided import DividedSlots
from offplan.capabilities.cached_experts import (
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
    ExpertSlots,
    MissRates,
)
from offplan.routing.use_order import UseOrder


def count(
    hits: int, copied: int, in_place: int, by_cores: int, *split: int, later: int = 0
) -> dict[str, int]:
    numbers = hits, copied, in_place, by_cores, *(split or (0, 0)), later
    names = "hits", "copied", "in_place", "whole_by_cores", "split", "chunks", "later"
    return dict(zip(names, numbers, strict=True))


HALF = MissRates(0.0, 1.0, 1.0)
"""Rates by which cores and link multiply as many; of an odd number the link brings one more."""
ALL = MissRates(0.0, 0.0, 1.0)
"""Rates by which the cores multiply all that is missed."""


def divided(num_slots: int, rates: MissRates, inner: int = 0, later: float = 0) -> DividedSlots:
    quota = round(later * LATER_PARTS)
    return DividedSlots(ExpertSlots(num_slots, 8, (), True, inner, quota), rates)


@pytest.mark.parametrize("num_slots", range(1, 9))
def test_where_nothing_is_divided_it_is_the_order_of_use(num_slots: int) -> None:
    drawn = np.random.default_rng(num_slots)
    slots, order = DividedSlots(ExpertSlots(num_slots, 8, ()), HALF), UseOrder(1, 8)
    for _ in range(60):
        chosen = drawn.integers(0, 8, drawn.integers(1, 7))
        before = order.reuse.distances[0, :num_slots].sum()
        slots.counts.clear()
        slots.step(chosen.tolist())
        order.take(chosen[None])
        assert slots.order == order.order[0].tolist()
        num_kept = min(num_slots, int(order.num_used[0]))
        assert slots.kept == set(order.order[0, :num_kept].tolist())
        assert slots.counts["hits"] == order.reuse.distances[0, :num_slots].sum() - before
        assert slots.by_cores == 0


@pytest.mark.parametrize("num_slots", range(1, 9))
@pytest.mark.parametrize("rates", [HALF, ALL])
def test_with_a_quota_for_all_it_is_the_order_of_use(num_slots: int, rates: MissRates) -> None:
    """What the cores multiply now is kept as if the link had brought it, while it brings any."""
    drawn = np.random.default_rng(num_slots)
    slots, order = divided(num_slots, rates, later=8), UseOrder(1, 8)
    for _ in range(LATER_STEPS):
        chosen = drawn.integers(0, 8, drawn.integers(1, 7))
        slots.step(chosen.tolist())
        order.take(chosen[None])
        num_kept = min(num_slots, int(order.num_used[0]))
        assert slots.kept == set(order.order[0, :num_kept].tolist())
    assert slots.counts["later"] > 0 or (num_slots == 1 and rates is HALF)


def test_by_hand() -> None:
    slots = divided(2, HALF)
    slots.step([3, 5])  # both missed; 5 is behind 3 in the order, so it is the cores'
    assert (slots.kept, slots.order[:2]) == ({3}, [3, 5])
    slots.step([5, 3, 6])  # 3 is there; of 5 and 6 the first was used last, and is brought
    assert (slots.kept, slots.order[:3]) == ({3, 5}, [3, 5, 6])
    slots.step([6])  # one is as fast by either, and the link's
    assert slots.kept == {3, 6}
    slots.step([0, 1, 2, 6])  # 6 is there; 0 and 1 are brought, of which one finds a slot
    assert slots.kept == {6, 0}
    assert slots.counts == count(2, 4, 1, 3)
    slots.settle([[7], [4]])
    assert slots.kept == {4, 7}
    slots.settle([[4]])
    assert slots.kept == {4, 7}


def test_more_than_the_slots() -> None:
    slots = divided(2, MissRates(0.0, 3.0, 1.0), later=8)
    slots.step([0, 1, 2, 3, 4, 5])  # 1 of 6 is the cores', and 2 of the other 5 find slots
    assert slots.counts == count(0, 2, 3, 1)  # none is left for later
    assert slots.kept == {0, 1}


def test_all_are_the_cores() -> None:
    slots = divided(2, ALL)
    slots.settle([[1, 2]])
    slots.step([0, 3, 1])
    assert slots.kept == {1, 2}
    assert slots.counts == count(1, 0, 0, 2)


def test_some_of_the_cores_are_brought_for_later() -> None:
    """Those used last, in place of those used longest ago, as a quota adds up."""
    slots = divided(3, ALL, later=0.75)
    slots.settle([[5], [6], [7]])
    slots.step([0, 1])  # three quarters of one: none
    assert slots.kept == {5, 6, 7}
    slots.step([2, 1])  # one and a half: 1 was used last
    assert slots.kept == {1, 6, 7}
    slots.step([3, 6])  # one and a quarter; 6 is there and stays, 1 was used later than 7
    assert slots.kept == {1, 3, 6}
    slots.step([1, 3, 6])
    slots.step([1, 3, 6])
    slots.step([0, 2])  # a quarter and 3 x 0.75
    assert slots.counts == count(7, 0, 0, 7, later=4)
    assert slots.kept == {0, 2, 6}  # of the three 6 was the first in the order


def test_credit_has_an_end() -> None:
    slots = divided(8, ALL, later=8)
    for _ in range(3):
        slots.step([])
    assert slots._credit == LATER_PARTS * MOST_LATER


def test_what_is_not_chosen_again_is_not_brought() -> None:
    """For so many steps; then it is seen again."""
    slots = divided(2, ALL, later=1)
    before = 0
    for number in range(4 * LATER_STEPS):
        # by turns, so that the two used last are never chosen; or the same all the time
        slots.step([number % 8 if number < 2 * LATER_STEPS else 5])
        if number % LATER_STEPS == LATER_STEPS - 1:
            brought, before = slots.counts["later"] - before, slots.counts["later"]
            assert brought == (LATER_STEPS, 0, 0, 1)[number // LATER_STEPS]


def test_what_was_chosen_again_counts_for_some_time() -> None:
    """The same for as long as it takes to decide, and then by turns: bit by bit it is forgotten."""
    slots = divided(2, ALL, later=1)
    brought = []
    for number in range(6 * LATER_STEPS):
        slots.step([5 if number < LATER_STEPS else number % 8])
        if number % LATER_STEPS == LATER_STEPS - 1:
            brought.append(slots.counts["later"])
    assert brought[2] > brought[1] > brought[0]
    assert brought[-1] == brought[-2]


def test_a_part_of_one_is_the_cores() -> None:
    """Of four chunks of each: 1.5 of 3 missed are 6 chunks, and half of one is 2."""
    slots = divided(3, HALF, 512)
    slots.step([0, 1, 2])  # 0 comes, 1 is divided, 2 is the cores'; the third slot keeps none
    assert slots.kept == {0}
    slots.step([3, 0])  # divided, too
    assert slots.kept == {0}
    assert slots.counts == count(1, 1, 0, 1, 2, 4)
    assert slots.by_cores == 2.0
    slots.step([4, 5])  # one and one
    slots.step([6, 7])
    assert slots.kept == {4, 6}
    assert slots.counts == count(1, 3, 0, 3, 2, 4)


def test_the_divided_one_is_the_first_to_be_brought_for_later() -> None:
    slots = divided(4, HALF, 512, later=1)
    slots.step([0, 1, 2])
    assert slots.kept == {0, 1}
    assert slots.counts == count(0, 1, 0, 1, 1, 2, later=1)
