"""Files of the Hub, brought whole into its own cache: checked, and bounded in bytes and time.

Several come at once, and nothing that hangs holds up the others.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import logging
from typing_extensions import Self

from offplan.checkpoint.answers import AGENT, checked_session
from offplan.checkpoint.failures import NoSuchFile, explaining
from offplan.checkpoint.folder import MAX_JSON_BYTES, is_inner_path
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.quiet import quietly
from offplan.checkpoint.ranges import retry
from offplan.errors import CheckpointError

PATIENCE_S = 120.0
"""Seconds without news after which the Hub is given up. News are files, and blocks of 10 MB."""
_NUM_THREADS = 8


class _Arrived:
    """Counts the bytes that have arrived, by file; for any thread."""

    def __init__(self, on_bytes: Callable[[int], None] | None) -> None:
        self._by_file: dict[str, int] = {}
        self._on_bytes, self._lock = on_bytes, Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._by_file.values())

    def set(self, where: str, num_bytes: int) -> None:
        """Take note of a file's bytes so far: fewer than before, where it begins anew."""
        with self._lock:
            self._by_file[where] = num_bytes
            if self._on_bytes is not None:
                self._on_bytes(sum(self._by_file.values()))


def find_file(repo: str, filename: str, commit: str) -> Path | None:
    """Return where the Hub's cache has this file of this commit, or None."""
    found = try_to_load_from_cache(repo, filename, revision=commit)
    return Path(found) if isinstance(found, str) else None


def is_absent(repo: str, filename: str, commit: str) -> bool:
    """Return True if the Hub said that this commit has no such file, as its cache knows."""
    found = try_to_load_from_cache(repo, filename, revision=commit)
    return found is not None and not isinstance(found, str)


def fetch(repo: str, filename: str, revision: str | None) -> Path:
    """Bring one small file into the Hub's cache, or find it there.

    Raises NoSuchFile if the repository has none, CheckpointError and HubError.
    """
    return next(fetch_each(repo, revision, {filename: MAX_JSON_BYTES}))


def fetch_where_present(repo: str, commit: str, filenames: tuple[str, ...]) -> None:
    """Bring those of these small files into the Hub's cache that the commit has.

    Raises CheckpointError and HubError.
    """
    wanted = {
        name: MAX_JSON_BYTES
        for name in filenames
        # A path where it is on disk, and another object where it is known that there is none.
        if try_to_load_from_cache(repo, name, revision=commit) is None
    }
    for _ in fetch_each(repo, commit, wanted, may_lack=True):
        pass


def fetch_each(
    repo: str,
    revision: str | None,
    max_bytes: Mapping[str, int],
    *,
    may_lack: bool = False,
    patience_s: float | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Path]:
    """Bring files into the Hub's cache, each of so many bytes at most, and yield them as they come.

    ``patience_s`` is how long to wait for news, PATIENCE_S if left out. ``on_bytes`` hears how many
    bytes have arrived, from any thread.

    Raises CheckpointError, HubError and, unless the repository ``may_lack`` files, NoSuchFile.
    """
    if revision is not None and not is_inner_path(revision):
        raise CheckpointError(
            f"{repo}: found {quote(revision)} as revision, expected a branch, a tag or a commit; "
            "correct `revision`, or the plan"
        )
    arrived = _Arrived(on_bytes)

    def bring(filename: str) -> Path | None:
        try:
            return _download(repo, filename, revision, max_bytes[filename], arrived)
        except NoSuchFile:
            if may_lack:
                return None
            raise

    with quietly(logging), explaining(repo, revision, " or ".join([*max_bytes][:2])):
        paths = in_threads(
            bring,
            max_bytes,
            patience_s=PATIENCE_S if patience_s is None else patience_s,
            num_threads=_NUM_THREADS,
            progress=lambda: arrived.num_bytes,
        )
        yield from (path for path in paths if path is not None)


def _download(
    repo: str, filename: str, revision: str | None, max_bytes: int, arrived: _Arrived
) -> Path:
    counter = _make_counter(f"{repo}: {filename}", max_bytes, arrived)

    def ask() -> Path:
        with checked_session():
            # How far it is comes to what stands where a bar would be shown.
            path = hf_hub_download(
                repo, filename, revision=revision, library_name=AGENT, tqdm_class=counter
            )
        return Path(path)

    with explaining(repo, revision, filename):
        return retry(ask)


def _make_counter(where: str, max_bytes: int, arrived: _Arrived) -> type:
    """Return what hears of a file's bytes before they are written, and refuses too many.

    It has what huggingface_hub calls of a progress bar, and shows nothing.
    """

    class Counter:
        def __init__(self, *, total: int | None = None, initial: int = 0, **_: object) -> None:
            self._num_bytes = initial  # of a download that was interrupted before
            self._check(total or 0)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, num_bytes: int = 1) -> None:
            self._num_bytes += num_bytes
            arrived.set(where, self._num_bytes)
            self._check(self._num_bytes)

        def set_postfix_str(self, *_: object, **__: object) -> None:
            pass

        def _check(self, num_bytes: int) -> None:
            if num_bytes > max_bytes:
                raise CheckpointError(
                    f"{where}: found more than {max_bytes} bytes, expected no file so large; the "
                    "server is not to be trusted: check HF_ENDPOINT"
                )

    return Counter


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
