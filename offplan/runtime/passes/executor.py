"""Runs a model by a schedule: around its layers the copies and waits are carried out."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from offplan.placement import Phase
from offplan.runtime.passes.link import Link
from offplan.schedule import Begin, ComputePiece, Copy, Operation, Schedule, Serve, Wait

Act = Operation | Callable[[], object]
"""An operation of the schedule, or what the host does beside it."""


class Executor:
    """Interleaves the operations of a schedule with a model's calls of its layers.

    Between passes nothing is carried out around them.
    """

    def __init__(
        self,
        link: Link,
        serve: Callable[[Serve], None],
        settle: Sequence[Callable[[int], None]] = (),
    ) -> None:
        """Ask ``link`` for copies and waits, and ``serve`` for what layers read in place.

        Each ``settle`` is told of a call of a prompt, before its layer's slot is filled again.
        """
        self._settle = settle
        self._carry_out = partial(carry_out, link, serve)
        self.is_prompt: bool
        """True if the pass that runs reads a prompt."""
        self._before: dict[_Place, list[Act]]
        self._after: dict[_Place, list[Act]]
        self._apply: Callable[[list[Act]], None]
        self.invalidate()

    def invalidate(self) -> None:
        """Carry out nothing around calls of layers, until a pass runs."""
        self._before, self._after, self.is_prompt = {}, {}, False
        self._apply = self._carry_out

    def run(self, schedule: Schedule, forward: Callable[[], Any]) -> Any:
        """Call ``forward``, which must call the layers as the schedule says.

        Each call is made between ``before`` and ``after``.
        """
        self.is_prompt = schedule.phase is Phase.PREFILL
        try:
            if start := self._split(schedule):
                self._apply(start)
            return forward()
        finally:
            self.invalidate()

    def capture(self, schedule: Schedule, forward: Callable[[], Any], pool: Any) -> "CapturedPass":
        """Capture ``forward`` as CUDA graph segments, cut wherever the schedule acts.

        Its temporary memory comes from ``pool``, a ``torch.cuda.graph_pool_handle``.
        Needs a warmed-up model, on a stream other than the default one. Nothing is executed: the
        ring and the caches stay as they are.
        """
        captured = CapturedPass(self._carry_out, pool)
        with captured:
            self._apply = captured.cut
            self.run(schedule, forward)
        return captured

    def before(self, number: int) -> None:
        """Carry out what precedes a call of a layer, counted from 0 on in each pass."""
        self._act(self._before, (number, None))

    def before_part(self, number: int, group: int, part: int) -> None:
        """Carry out what precedes a part of a layer's experts, whose call is ``number``.

        It is for a group of chunks.
        """
        self._act(self._before, (number, (group, part)))

    def after_part(self, number: int, group: int, part: int) -> None:
        """Carry out what follows a part."""
        self._act(self._after, (number, (group, part)))

    def after(self, number: int) -> None:
        """Carry out what follows a call of a layer."""
        if self.is_prompt:
            for settle in self._settle:
                settle(number)
        self._act(self._after, (number, None))

    def call(self, function: Callable[[], object]) -> None:
        """Call what no graph may capture: now, and at this place of each replay."""
        self._apply([function])

    def _act(self, planned: dict["_Place", list[Act]], place: "_Place") -> None:
        if operations := planned.pop(place, None):
            self._apply(operations)

    def _split(self, schedule: Schedule) -> list[Act]:
        """Sort operations by the call they precede or follow; return the copies before any call.

        A copy belongs right behind the call that freed its slot. A wait belongs right before the
        call that needs it, and so does what the layer is served. Between two calls all copies come
        before all waits.
        """
        start: list[Act] = []
        copies, number = start, 0
        waits: list[Act] = []
        for op in schedule.operations:
            if isinstance(op, Copy):
                copies.append(op)
            elif isinstance(op, Wait | Serve):
                waits.append(op)
            else:
                place = number, (op.group, op.piece) if isinstance(op, ComputePiece) else None
                if waits:
                    self._before[place] = waits
                    waits = []
                if not isinstance(op, Begin):
                    copies = self._after.setdefault(place, [])
                    number += not isinstance(op, ComputePiece)
        return start


_Place = tuple[int, tuple[int, int] | None]
"""A call of a layer, or a part of its experts for a group of chunks."""


def carry_out(link: Link, serve: Callable[[Serve], None], operations: list[Act]) -> None:
    """Ask the link for each copy and wait, and ``serve`` for what is read in place."""
    for operation in operations:
        if isinstance(operation, Copy):
            link.copy(operation)
        elif isinstance(operation, Wait):
            link.wait(operation)
        elif isinstance(operation, Serve):
            serve(operation)
        elif callable(operation):
            operation()


class CapturedPass:
    """A pass as CUDA graphs; the host carries out operations and makes calls between them."""

    def __init__(self, carry_out: Callable[[list[Act]], None], pool: Any) -> None:
        self._carry_out = carry_out
        self._pool = pool
        self._parts: list[torch.cuda.CUDAGraph | list[Act]] = []
        self._empty: list[torch.cuda.CUDAGraph] = []
        """Graphs kept because torch captures nothing more in a pool whose last graph is gone.

        Source: ``releasePool`` in c10/cuda/CUDACachingAllocator.cpp.
        """
        self._graph: torch.cuda.CUDAGraph | None = None

    def __enter__(self) -> "CapturedPass":
        torch.cuda.synchronize()
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def cut(self, operations: list[Act]) -> None:
        """End the segment, note the operations, begin the next segment."""
        self._end()
        self._parts.append(list(operations))
        self._begin()

    def replay(self) -> None:
        """Run the pass once on the current stream; the host waits in what it calls alone."""
        for part in self._parts:
            if isinstance(part, list):
                self._carry_out(part)
            else:
                part.replay()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        # the only public sign that nothing ran between two cuts is torch's warning
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        is_empty = any("graph is empty" in str(w.message).lower() for w in caught)
        (self._empty if is_empty else self._parts).append(graph)
