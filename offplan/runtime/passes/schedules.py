"""The schedules of a model's passes, each from the ring that the pass before has left."""

from functools import cache, partial

from offplan.placement import Phase, Placement
from offplan.schedule import Calls, Schedule, build_pass, empty_ring


class PassSchedules:
    """Builds the schedule of each pass, and knows what the pass leaves in the ring."""

    def __init__(self, placement: Placement, num_layers: int, calls: Calls | None = None) -> None:
        """Schedule passes that call the layers as ``calls`` says, each once if left out."""
        self._placement = placement
        self._ring = empty_ring(placement)
        # schedules soon repeat, and of 64 layers one takes 0.6 ms to make
        self._build = cache(partial(build_pass, placement, num_layers, calls=calls))

    def next(self, phase: Phase, following: Phase = Phase.DECODE, num_chunks: int = 1) -> Schedule:
        """Return the schedule of a pass that one of the phase ``following`` follows."""
        if not self._placement.chunks_at_once:
            num_chunks = 1  # however many there are, the schedule is the same
        schedule: Schedule = self._build(phase, self._ring, following, num_chunks=num_chunks)
        self._ring = schedule.after
        return schedule

    def invalidate(self) -> None:
        """Believe the ring empty, whatever was copied there or is on its way."""
        self._ring = empty_ring(self._placement)
