"""Work on many things at once, which nothing that hangs can hold up."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    patience_s: float,
    num_threads: int = 12,
    progress: Callable[[], int] = lambda: 0,
) -> Iterator[_Result]:
    """Yield what ``work`` makes of each item, as the results come; raises the first error.

    Raises TimeoutError when for ``patience_s`` seconds no result comes and what ``progress``
    returns stays the same. Work that still runs then, or when the caller turns away, is abandoned
    to its daemon thread. So the process can end, as it could not with an executor, which waits for
    its own.
    """
    todo = list(items)
    num_items = len(todo)
    shared = iter(todo)
    finished: SimpleQueue[Future[_Result]] = SimpleQueue()

    def run() -> None:
        # Each item goes to one thread, and after ``clear`` none does.
        for item in shared:
            future: Future[_Result] = Future()
            try:
                future.set_result(work(item))
            except BaseException as error:
                todo.clear()
                future.set_exception(error)
            finished.put(future)

    for _ in range(min(num_threads, num_items)):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in range(num_items):
            yield _take(finished, patience_s, progress).result()
    finally:
        todo.clear()


def _take(
    finished: "SimpleQueue[Future[_Result]]", patience_s: float, progress: Callable[[], int]
) -> "Future[_Result]":
    while True:
        before = progress()
        try:
            return finished.get(timeout=patience_s)
        except Empty:
            if progress() == before:
                raise TimeoutError(f"nothing more came in {patience_s:.3g} s") from None
