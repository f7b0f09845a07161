"""Slots whose missed experts are divided: against the order of use, and by hand."""

import numpy as np
import pytest

from offplan.routing.divided import DividedSlots
from offplan.routing.use_order import UseOrder


@pytest.mark.parametrize("num_slots", range(1, 9))
def test_where_nothing_is_divided_it_is_the_order_of_use(num_slots: int) -> None:
    drawn = np.random.default_rng(num_slots)
    slots, order = DividedSlots(8, num_slots, 0.0), UseOrder(1, 8)
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
        assert slots.counts["by_cores"] == 0


def test_by_hand() -> None:
    slots = DividedSlots(8, 2, 0.5)
    slots.step([3, 5])  # both missed; 5 is behind 3 in the order, so it is the cores'
    assert (slots.kept, slots.order[:2]) == ({3}, [3, 5])
    slots.step([5, 3, 6])  # 3 is there; of 5 and 6 the first was used last, and is brought
    assert (slots.kept, slots.order[:3]) == ({3, 5}, [3, 5, 6])
    slots.step([6])  # half of one is rounded up
    assert slots.kept == {3, 5}
    assert slots.order[0] == 6
    slots.step([0, 1, 2, 6])  # half of 4: 6 and 0 are brought for 3 and 5
    assert slots.kept == {6, 0}
    assert slots.counts == {"hits": 1, "copied": 4, "in_place": 0, "by_cores": 5}
    slots.settle([[7], [4]])
    assert slots.kept == {4, 7}
    slots.settle([[4]])
    assert slots.kept == {4, 7}


def test_more_than_the_slots() -> None:
    slots = DividedSlots(8, 2, 0.25)
    slots.step([0, 1, 2, 3, 4, 5])  # 2 of 6 are the cores', and 2 of the other 4 find slots
    assert slots.counts == {"hits": 0, "copied": 2, "in_place": 2, "by_cores": 2}
    assert slots.kept == {0, 1}


def test_all_are_the_cores() -> None:
    slots = DividedSlots(4, 2, 1.0)
    slots.settle([[1, 2]])
    slots.step([0, 3, 1])
    assert slots.kept == {1, 2}
    assert slots.counts == {"hits": 1, "copied": 0, "in_place": 0, "by_cores": 2}
