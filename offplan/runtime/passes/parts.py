"""Layers in parts: chunks wait at a layer's experts until each part of these has met them.

All chunks wait at once, or group by group: the next group enters once the one before has left.

A chunk runs in a greenlet, a coroutine on the same thread: it is left in the middle of its layer,
and goes on there. torch's streams, modes and grad state are those of the thread, and stay.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from offplan.runtime.model.parts import Arrived, ExpertsInParts
from offplan.runtime.passes.executor import Executor
from offplan.runtime.refusal import refuse

Step = Callable[[], torch.Tensor]
"""Takes a chunk through a layer; returns its hidden states."""
Around = Callable[[], AbstractContextManager[Any]]
"""Makes the context that a chunk runs in."""


class PartRunner:
    """Runs layers whose experts stream in parts; other layers, and steps, it leaves alone."""

    def __init__(self, layers: Mapping[int, ExpertsInParts], executor: Executor) -> None:
        """Ask ``executor`` for the copies and waits of each part."""
        self._layers, self._executor = layers, executor
        self.chunks_as_one = 1
        """Chunks of the pass at hand that have the tokens of one of all rows of the cache."""

    def is_parted(self, index: int) -> bool:
        """Return True if the pass at hand runs a layer in parts."""
        return index in self._layers and self._executor.is_prompt

    def run(self, index: int, steps: Sequence[tuple[Step, Around]]) -> list[torch.Tensor]:
        """Take chunks through a layer, which all of a group enter before any leaves it.

        Raises CheckpointError for a layer that does not come to its experts exactly once.
        """
        planned = self._layers[index].chunks_at_once
        at_once = len(steps) if planned is None else planned * self.chunks_as_one
        firsts = range(0, len(steps), at_once)
        made = []
        for group, first in enumerate(firsts):
            made += self._run_group(index, group, steps[first : first + at_once])
        return made

    def _run_group(
        self, index: int, group: int, steps: Sequence[tuple[Step, Around]]
    ) -> list[torch.Tensor]:
        from greenlet import getcurrent, greenlet  # where parts run, and nowhere else

        experts, here = self._layers[index], getcurrent()
        chunks = [greenlet(step, here) for step, _ in steps]

        def go_on(number: int, *given: object) -> Any:
            # contexts of several chunks would not nest: none is left open where a chunk waits
            with steps[number][1]():
                return chunks[number].switch(*given)

        experts.take(here.switch)
        try:
            arrived: list[Arrived] = []
            for number in range(len(chunks)):
                came = go_on(number)
                if not isinstance(came, Arrived):
                    raise refuse(f"layer {index} does not call its experts, whose parts stream")
                arrived.append(came)
            meetings = experts.meet(arrived)
            del came, arrived
            borrowed = [each.borrow() for each in meetings]
            for each in borrowed:
                self._executor.call(each.count)
            for part in range(experts.num_parts):
                self._executor.before_part(index, group, part)
                for each in borrowed:
                    self._executor.call(partial(experts.add, each, part))
                self._executor.after_part(index, group, part)
            sums = [each for meeting in meetings for each in meeting.finish()]
            del each, meetings, borrowed  # or they would be kept
            made = []
            for number in range(len(chunks)):
                hidden = go_on(number, sums[number])
                if not isinstance(hidden, torch.Tensor):
                    raise refuse(f"layer {index} calls its experts twice, whose parts stream")
                made.append(hidden)
            return made
        finally:
            experts.take(None)
            for chunk in chunks:
                if chunk:  # begun and not ended: its memory is held until it ends
                    chunk.throw()
