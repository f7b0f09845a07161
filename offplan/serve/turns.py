"""Jobs that wait: clients take turns, and each one's jobs keep their order."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar


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
