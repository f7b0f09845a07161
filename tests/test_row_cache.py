"""Sizes of a row of the cache by hand, and the tokens that a pass may go on from by trial."""

from itertools import product

import pytest

from offplan.checkpoint.model import KVCache
from offplan.row_cache import RowCache

WHOLE, WINDOW = KVCache(100), KVCache(10, window=8)
STATE, SHARING = KVCache(state_bytes=7), KVCache(window=8)


@pytest.mark.parametrize(
    ("layers", "context", "nbytes"),
    [
        ([WHOLE, WHOLE], 20, 2 * 20 * 100),
        ([WHOLE, WINDOW], 20, 20 * 100 + 2 * 8 * 10),
        ([WHOLE, WINDOW], 8, 8 * 110),  # a window that the context fits in
        ([WINDOW, STATE], 9, 2 * (8 * 10 + 7)),
        ([WHOLE, WINDOW, SHARING], 20, 20 * 100 + 2 * 8 * 10),
        ([], 20, 0),
    ],
)
def test_bytes(layers: list[KVCache], context: int, nbytes: int) -> None:
    assert RowCache(layers, context).nbytes == nbytes


def test_the_last_window_alike_is_read() -> None:
    layers = [WINDOW, WINDOW, WHOLE, KVCache(10, window=4), SHARING, SHARING, KVCache()]
    row = RowCache(layers, 20)
    assert [row.owner(layer) for layer in range(7)] == [None] * 4 + [1, 1, None]
    assert (row.shared_rings, row.waiting_token_bytes) == ({1}, 10)
    assert not RowCache(layers, 8).shared_rings  # that keep the context


def test_a_pass_goes_on_where_rings_have_what_it_sees() -> None:
    """A ring holds position p at p mod 8; a step of others writes to the place of the next."""
    row = RowCache([WHOLE, WINDOW], 30)
    for length, common in product(range(30), range(30)):
        if common > length:
            continue
        places = {position % 8: position for position in range(length)}
        places.pop(length % 8, None)
        begun = row.begin_at(common, length)
        assert begun in (0, common)
        assert {*range(max(0, begun - 7), begun)} <= {*places.values()}
        assert begun == common or length >= 8


def test_what_a_pass_adds_to_states_is_kept_beside_them() -> None:
    plain, drafted = (RowCache([WINDOW, STATE], 30, drafts, 5) for drafts in (0, 3))
    assert (plain.addition_bytes, drafted.addition_bytes) == (0, 4 * 5)
    # the window has three places more, and so has its checkpoint
    assert drafted.nbytes - plain.nbytes == 4 * 5 + 2 * 3 * 10


def test_a_state_serves_its_own_text_alone() -> None:
    row = RowCache([WHOLE, STATE], 30)
    assert [row.begin_at(common, 5) for common in (3, 4, 5)] == [0, 0, 5]
    assert RowCache([WHOLE], 30).begin_at(3, 5) == 3
