"""The schedule of each pass, which begins with what the pass before has left in the ring."""

from functools import cache, partial

from offplan.placement import Phase, Placement
from offplan.schedule import Ring, Schedule, build_pass, empty_ring


class Schedules:
    """Makes schedules one after another and keeps account of the ring between them."""

    def __init__(self, placement: Placement, num_layers: int) -> None:
        self._empty: Ring = empty_ring(placement)
        self._ring = self._empty
        # schedules soon repeat, and of 64 layers one takes 0.6 ms to make
        self._build = cache(partial(build_pass, placement, num_layers))

    def next(self, phase: Phase, upcoming: Phase) -> Schedule:
        """Return the schedule of the next pass, which prepares the ring for the ``upcoming`` one.

        The pass has to run to its end, or ``forget`` has to be called.
        """
        schedule = self._build(phase, self._ring, upcoming)
        self._ring = schedule.after
        return schedule

    def forget(self) -> None:
        """Take the ring to be empty: the next pass copies again what it needs."""
        self._ring = self._empty
