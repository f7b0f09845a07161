"""Work in threads that nothing holds up."""

from threading import Event

import pytest

from offplan.checkpoint.download import in_threads


def test_results_come_as_they_are_ready() -> None:
    second_is_done = Event()

    def work(number: int) -> int:
        if number == 1:
            second_is_done.wait(5)
        else:
            second_is_done.set()
        return number

    assert [*in_threads(work, [1, 2], patience_s=5)] == [2, 1]
    assert [*in_threads(work, [], patience_s=5)] == []


def test_an_error_ends_the_work() -> None:
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        [*in_threads(work, range(1000), patience_s=5, num_threads=1)]
    assert begun == [0]


def test_what_hangs_is_abandoned() -> None:
    never = Event()
    with pytest.raises(TimeoutError, match="nothing more came"):
        [*in_threads(lambda _: never.wait(9), [1], patience_s=0.01)]
    never.set()


def test_progress_is_waited_for() -> None:
    seen = []

    def progress() -> int:
        seen.append(1)
        if len(seen) > 6:
            ready.set()
        return len(seen)

    ready = Event()
    found = in_threads(lambda _: ready.wait(9), [1], patience_s=0.01, progress=progress)
    assert [*found] == [True]
