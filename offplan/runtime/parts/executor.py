"""Executes prompts in parts: chunks wait at a layer's experts until each part has met them.

All chunks wait at once, or group by group: the next group enters once the one before has left.

A chunk runs in a greenlet, a coroutine on the same thread: it is left in the middle of its layer,
and goes on there. torch's streams, modes and grad state are those of the thread, and stay.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from typing_extensions import Self

from offplan.errors import OffplanError
from offplan.runtime.loading.capability import CapabilityExecutor, Prepared, Steps
from offplan.runtime.memory.store import WeightStore
from offplan.runtime.parts.experts import Arrived, ExpertsInParts
from offplan.runtime.passes.executor import Executor
from offplan.runtime.refusal import refuse
from offplan.schedule import piece_slots_of


class PartsExecutor(CapabilityExecutor):
    """Runs prompts through layers whose experts stream in parts."""

    def __init__(self, prepared: Prepared) -> None:
        """Check experts that stream in parts; raises PlanError if they cannot be read so."""
        self._found = prepared.find_experts("parts", lambda entry: entry.num_pieces > 1)
        self.layers: dict[int, ExpertsInParts] = {}
        """Experts of each layer in parts, once attached."""
        self.prompt_layers = self._found.keys()
        self._chunks_as_one = 1

    @classmethod
    def find(cls, prepared: Prepared) -> Self | None:
        """Return an executor if prompts stream anything in parts."""
        return cls(prepared) if prepared.placement.pieces else None

    def prepare(self, device: torch.device, host_threads: int | None) -> None:
        """Raise OffplanError if the package is missing."""
        if find_spec("greenlet") is None:
            raise OffplanError(
                "a rule has parts, and prompts in parts need the package greenlet: pip install "
                "greenlet"
            )

    def attach(self, store: WeightStore) -> None:
        """Have experts be read in prompts from the slots that their parts take turns in."""
        for layer, turns in piece_slots_of(store.placement).items():
            experts, names = self._found[layer]
            wholes = [store.offloaded[name] for name in names]
            parts = [
                {
                    name.rpartition(".")[2]: _view(whole, store.slots[slot][at : at + stop - start])
                    for name, whole, (start, stop, at) in zip(names, wholes, span.runs, strict=True)
                }
                for slot, span in turns
            ]
            at_once = store.placement.chunks_at_once.get(layer)
            self.layers[layer] = ExpertsInParts(experts, parts, at_once)

    def begin(self, num_rows: int, chunks_as_one: int) -> None:
        """Have a group of chunks be as many tokens as planned, of one row or of all."""
        self._chunks_as_one = chunks_as_one

    def run_layer(self, executor: Executor, index: int, steps: Steps) -> list[torch.Tensor]:
        """Take chunks through a layer, which all of a group enter before any leaves it.

        Raises CheckpointError for a layer that does not come to its experts exactly once.
        """
        planned = self.layers[index].chunks_at_once
        at_once = len(steps) if planned is None else planned * self._chunks_as_one
        made = []
        for group, first in enumerate(range(0, len(steps), at_once)):
            made += self._run_group(executor, index, group, steps[first : first + at_once])
        return made

    def _run_group(
        self, executor: Executor, index: int, group: int, steps: Steps
    ) -> list[torch.Tensor]:
        from greenlet import getcurrent, greenlet  # where parts run, and nowhere else

        experts, here = self.layers[index], getcurrent()
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
                executor.call(each.count)
            for part in range(experts.num_parts):
                executor.before_part(index, group, part)
                for each in borrowed:
                    executor.call(partial(experts.add, each, part))
                executor.after_part(index, group, part)
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

    def invalidate(self) -> None:
        """Hand no chunks over."""
        for each in self.layers.values():
            each.take(None)

    def close(self) -> None:
        """Let go of the slots."""
        self.layers.clear()


def _view(whole: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """View bytes as some experts of a parameter of all, [experts, ...]."""
    return memory.view(whole.dtype).view(-1, *whole.shape[1:])
