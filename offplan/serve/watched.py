"""A thread that takes calls one after the other, and says for how long it has been at one."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class WatchedThread(ThreadPoolExecutor):
    """One thread, by which the event loop goes on while a call takes its time."""

    def __init__(self, name: str, what: str) -> None:
        """Take calls on a thread of this name; ``what`` is at work there, in words."""
        super().__init__(1, name)
        self.what = what
        self._began_s: float | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()

    @property
    def busy_s(self) -> float:
        """Seconds that the call at hand has taken; 0 without one."""
        began = self._began_s
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Have a call made behind those that were submitted before."""
        return super().submit(self._time, call, *args, **kwargs)

    def join(self, timeout_s: float) -> bool:
        """Wait for the call at hand; return whether it has ended."""
        return self._is_idle.wait(timeout_s)

    def _time(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._is_idle.clear()
        self._began_s = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            self._began_s = None
            self._is_idle.set()
