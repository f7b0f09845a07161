"""The thread that owns the session: it makes steps, and takes requests in between."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from offplan.drafts.counts import DraftCounts
from offplan.errors import InputError, NotANumberError, OffplanError
from offplan.runtime.joined import Added, Continued, JoinedTexts
from offplan.serve.errors import ApiError, refuse_ending
from offplan.serve.guard import Guard
from offplan.serve.metrics import Metrics
from offplan.serve.requests import Request


class Waiting(Protocol):
    """A job that waits for its turn."""

    turn: Hashable
    """Whose turn it waits for."""
    is_cancelled: bool


W = TypeVar("W", bound=Waiting)


class Turns(dict[Hashable, deque[W]]):
    """Jobs that wait, by client; the client that was served longest ago comes first."""

    @property
    def num_waiting(self) -> int:
        """Jobs of all clients."""
        return sum(map(len, self.values()))

    def count(self, turn: Hashable) -> int:
        """Count the jobs of one client."""
        return len(self.get(turn, ()))

    def add(self, job: W) -> None:
        """Have a job wait behind those of its client."""
        self.setdefault(job.turn, deque()).append(job)

    def take(self, num_jobs: int, running: Iterable[W]) -> list[W]:
        """Take up to so many jobs out.

        Each job is the first of the client with the fewest running jobs, those of this call
        included. Of several such clients, the client served longest ago comes first.
        """
        num_running, taken = Counter(job.turn for job in running), list[W]()
        while self and len(taken) < num_jobs:
            turn = min(self, key=num_running.__getitem__)
            jobs = self.pop(turn)
            taken.append(jobs.popleft())
            num_running[turn] += 1
            if jobs:
                self[turn] = jobs  # behind all others
        return taken

    def drop_cancelled(self) -> None:
        """Leave out the jobs that nobody waits for."""
        for turn, jobs in [*self.items()]:
            left = deque(job for job in jobs if not job.is_cancelled)
            if left:
                self[turn] = left
            else:
                del self[turn]


class Client(NamedTuple):
    """The client that asks."""

    owner: Hashable
    """Whose prefixes: a text goes on from those of an equal owner alone."""
    turn: Hashable
    """Whose turn: clients take rows in turn, and wait up to a bound each."""


def identify(asked: Request, guard: Guard, address: str, *, shares_prefixes: bool) -> Client:
    """Tell the client of a request that came from an address.

    The server's key, or being on this machine, is the base of an identity; the request's own fields
    separate further. Without a base, these fields name an owner of prefixes, which others can claim
    only if they know it. A request without such fields shares with no other. Only without a base
    does the address decide turns: behind a proxy many clients have the same. Fields that strangers
    choose would get them as many turns as they like.
    """
    base = guard.api_key or ("here" if guard.is_local else None)
    owner: Hashable = (base, *asked.identity)
    if base is None and not asked.identity:
        owner = object()
    return Client(
        None if shares_prefixes else owner,
        ("address", address) if base is None else (base, *asked.identity),
    )


@dataclass(frozen=True)
class Failed:
    """Ends a job: why it got no further."""

    error: ApiError


Event = Added | Failed
"""An event for a job's owner: a text's tokens until the text has ended, or a failure."""


@dataclass(eq=False)
class Job:
    """A text that is to be continued, and who hears of it."""

    continued: Continued
    tell: Callable[[Event], None]
    """Called on the worker's thread; must neither wait nor raise."""
    turn: Hashable = None
    """The client whose turn it waits for."""
    is_cancelled: bool = False
    """True if nobody waits for the text any more."""
    asked_s: float = field(default_factory=time.perf_counter)
    last_s: float | None = None
    """Time at which its last token came, by ``perf_counter``; None before the first one."""


class Worker:
    """Continues the texts of jobs on a thread of its own; the rest wait.

    Clients take the free rows in turn, and each one's jobs keep their order (``Turns``). Jobs that
    wait join together between two steps, as far as there is room. Weights off the GPU then cross
    the link once for all of their prompts.
    """

    def __init__(
        self,
        texts: JoinedTexts,
        metrics: Metrics,
        *,
        most_waiting: int,
        most_of_client: int | None = None,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """Continue up to as many texts as can join; ``most_waiting`` more wait.

        Of one client ``most_of_client`` wait, or all of them if left out. ``on_fault`` hears of
        each error of a pass, on the worker's thread.
        """
        self._texts, self._metrics, self._on_fault = texts, metrics, on_fault
        self._most_waiting = most_waiting
        self._most_of_client = most_waiting if most_of_client is None else most_of_client
        self._changed = threading.Condition()
        self._waiting = Turns[Job]()
        self._running: dict[Continued, Job] = {}
        self._reserved: Counter[Hashable] = Counter()
        self.drafts = DraftCounts()
        """Drafts of the texts that have ended."""
        self._nan = ""
        """Source of the first NaN; empty while there was none."""
        self._is_draining = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="offplan-session", daemon=True)

    @property
    def num_rows(self) -> int:
        """Texts that are continued at a time, at most."""
        return self._texts.num_rows

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def reserve(self, num_jobs: int, turn: Hashable = None) -> None:
        """Keep room for so many jobs of a client, which ``submit`` or ``give_up`` takes back.

        Raises ApiError with 429 if too many of the client's jobs wait, and with 503 if too many of
        all do or the server ends. Raises it with 400 for more jobs than there will ever be room
        for.
        """
        room = min(self._most_waiting, self._most_of_client) + self._texts.num_rows
        if num_jobs > room:
            raise ApiError(
                400,
                f"{num_jobs} prompts, and this server takes {room} at a time: send fewer",
                param="prompt",
            )
        with self._changed:
            if self._is_draining or self._is_stopped:
                raise refuse_ending()
            num_free = self._texts.num_rows - len(self._running)
            found = self._count_waiting()
            if found + num_jobs > self._most_waiting + num_free:
                raise ApiError(503, f"{found} texts wait already: ask later", code="queue_full")
            found = self._waiting.count(turn) + self._reserved[turn]
            if found + num_jobs > self._most_of_client + num_free:
                raise ApiError(
                    429,
                    f"{found} texts of this client wait already, and the server lets "
                    f"{self._most_of_client} of one client wait: ask again when some have ended",
                    code="rate_limit_exceeded",
                )
            self._reserve(num_jobs, turn)

    def give_up(self, num_jobs: int, turn: Hashable = None) -> None:
        """Take back room that was reserved, and not used."""
        with self._changed:
            self._reserve(-num_jobs, turn)

    def submit(self, job: Job) -> None:
        """Queue a job, for which room is reserved."""
        with self._changed:
            if self._is_stopped:
                job.tell(Failed(refuse_ending()))
            else:
                self._waiting.add(job)
            self._reserve(-1, job.turn)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job before its next token; nobody is told."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def drain(self) -> None:
        """Take no more jobs; those that are here are finished."""
        with self._changed:
            self._is_draining = True

    def stop(self) -> None:
        """End all jobs behind the pass at hand, and the thread; waits for neither."""
        with self._changed:
            self._is_draining = self._is_stopped = True
            self._changed.notify()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end after ``stop``; return whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            try:
                self._drop_cancelled()
                self._join_waiting()
                self._step()
            except Exception as error:  # a mistake here must not leave every client waiting
                self._fail(list(self._running.values()), error)

    def _wait(self) -> bool:
        """Wait until there is something to do; False once the worker is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting or self._running)
            if not self._is_stopped:
                return True
            left = [*self._running.values(), *self._waiting.take(self._waiting.num_waiting, ())]
        for job in left:
            self._end(job)
            job.tell(Failed(refuse_ending()))
        return False

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running.values() if job.is_cancelled]:
            self._end(job)
        with self._changed:
            self._waiting.drop_cancelled()
            self._note()

    def _join_waiting(self) -> None:
        with self._changed:
            jobs = self._waiting.take(self._texts.num_free, self._running.values())
            self._running.update((job.continued, job) for job in jobs)
            self._note()
        if jobs:
            self._join(jobs)

    def _join(self, jobs: Sequence[Job]) -> None:
        try:
            self._texts.join([job.continued for job in jobs])
        except Exception as error:
            lost = self._find_lost()
            if isinstance(error, InputError) and len(jobs) == 1 and not lost:
                self._end(jobs[0])
                jobs[0].tell(Failed(ApiError(400, error.facts)))
                return
            if len(jobs) == 1:
                self._fail([*jobs, *lost], error)
                return
            self._fail(lost, error)
            for job in jobs:  # one of them may be at fault, or too many at once
                self._join([job])
            return
        for job in jobs:
            self._metrics.prompt_tokens.inc(len(job.continued.text.prompt))
            self._metrics.read_tokens.inc(job.continued.num_read)

    def _step(self) -> None:
        try:
            for continued, added in self._texts.step():
                self._take(self._running[continued], added)
        except Exception as error:
            # all of them were in the pass, and would be in the same one again
            self._find_lost()
            self._fail(list(self._running.values()), error)

    def _find_lost(self) -> list[Job]:
        return [self._running[each] for each in self._texts.find_lost() if each in self._running]

    def _take(self, job: Job, added: Added | Exception) -> None:
        if not isinstance(added, Added):
            if isinstance(added, InputError):
                self._end(job)
                job.tell(Failed(ApiError(400, added.facts)))
                return
            if isinstance(added, NotANumberError):
                added = self._explain(job)
            self._fail([job], added)
            return
        now, before = time.perf_counter(), job.last_s
        if before is None:
            self._metrics.first_token_s.observe(now - job.asked_s)
        else:
            self._metrics.token_s.observe(now - before)
        job.last_s = now
        self._metrics.made_tokens.inc()
        if job.continued.text.finish is not None:
            self._end(job)
        job.tell(added)

    def _explain(self, job: Job) -> NotANumberError:
        """Find the layer of the first NaN; a broken model gives others, and each waits for it."""
        found = self._texts.explain_nan(job.continued, self._nan)
        self._nan = found.cause
        return found

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        """End jobs by the error of a pass; the client learns no more than its kind."""
        self._on_fault(error)
        kind = type(error).__name__ if isinstance(error, OffplanError) else "an error"
        message = (
            f"a pass of the model failed ({kind}), and ended this text; the server's log has it"
        )
        for job in jobs:
            self._end(job)
            job.tell(Failed(ApiError(500, message, code="pass_failed")))

    def _end(self, job: Job) -> None:
        self._texts.leave(job.continued)
        if self._running.pop(job.continued, None) is not None and job.continued.drafts is not None:
            self.drafts.add(job.continued.drafts)
        self._note()

    def _count_waiting(self) -> int:
        return self._waiting.num_waiting + self._reserved.total()

    def _reserve(self, num_jobs: int, turn: Hashable) -> None:
        self._reserved[turn] += num_jobs
        if not self._reserved[turn]:
            del self._reserved[turn]
        self._note()

    def _note(self) -> None:
        self._metrics.waiting.set(self._count_waiting())
        self._metrics.running.set(len(self._running))


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
