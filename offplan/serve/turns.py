"""Clients and their jobs that wait: clients take turns, and each one's jobs keep their order."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from offplan.serve.guard import Guard
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
