"""Slots whose missed experts are divided: against the order of use, and by hand."""

import numpy as np
import pytest

from benchmarks.divided import DividedSlots
from offplan.capabilities.cached_experts import ExpertSlots
from offplan.routing.use_order import UseOrder


def count(hits: int, copied: int, in_place: int, by_cores: int, *split: int) -> dict[str, int]:
    numbers = hits, copied, in_place, by_cores, *(split or (0, 0))
    names = "hits", "copied", "in_place", "whole_by_cores", "split", "chunks"
    return dict(zip(names, numbers, strict=True))


@pytest.mark.parametrize("num_slots", range(1, 9))
def test_where_nothing_is_divided_it_is_the_order_of_use(num_slots: int) -> None:
    drawn = np.random.default_rng(num_slots)
    slots, order = DividedSlots(ExpertSlots(num_slots, 8, ())), UseOrder(1, 8)
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


def test_by_hand() -> None:
    slots = DividedSlots(ExpertSlots(2, 8, (), 0.5))
    slots.step([3, 5])  # both missed; 5 is behind 3 in the order, so it is the cores'
    assert (slots.kept, slots.order[:2]) == ({3}, [3, 5])
    slots.step([5, 3, 6])  # 3 is there; of 5 and 6 the first was used last, and is brought
    assert (slots.kept, slots.order[:3]) == ({3, 5}, [3, 5, 6])
    slots.step([6])  # half of one is rounded up
    assert slots.kept == {3, 5}
    assert slots.order[0] == 6
    slots.step([0, 1, 2, 6])  # half of 4: 6 and 0 are brought for 3 and 5
    assert slots.kept == {6, 0}
    assert slots.counts == count(1, 4, 0, 5)
    slots.settle([[7], [4]])
    assert slots.kept == {4, 7}
    slots.settle([[4]])
    assert slots.kept == {4, 7}


def test_more_than_the_slots() -> None:
    slots = DividedSlots(ExpertSlots(2, 8, (), 0.25))
    slots.step([0, 1, 2, 3, 4, 5])  # 2 of 6 are the cores', and 2 of the other 4 find slots
    assert slots.counts == count(0, 2, 2, 2)
    assert slots.kept == {0, 1}


def test_all_are_the_cores() -> None:
    slots = DividedSlots(ExpertSlots(2, 4, (), 1.0))
    slots.settle([[1, 2]])
    slots.step([0, 3, 1])
    assert slots.kept == {1, 2}
    assert slots.counts == count(1, 0, 0, 2)


def test_a_part_of_one_is_the_cores() -> None:
    """Of four chunks of each: 1.5 of 3 missed are 6 chunks, and half of one is 2."""
    slots = DividedSlots(ExpertSlots(3, 8, (), 0.5, 512))
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
