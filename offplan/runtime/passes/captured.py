"""Passes captured as CUDA graph segments, with the tensors that they read and write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offplan.placement import Phase
from offplan.runtime.passes.executor import CapturedPass, Executor
from offplan.schedule import Schedule

MakeLogits = Callable[[torch.Tensor], torch.Tensor]
"""A call makes logits of tokens, int64 of [batch, new] on the device: [batch, vocabulary], or in
passes that check drafts [new, vocabulary]."""


class Passes:
    """Runs passes: as they are at first, captured when they come again.

    Libraries allocate workspaces at their first call, which must not happen in a capture. Captured
    passes, the last prompt and a step of each shape, keep their temporary memory until a prompt
    comes that is not captured.
    """

    def __init__(
        self, executor: Executor, give_back: Callable[[Callable[[], object]], None]
    ) -> None:
        """Run by ``executor``; ``give_back`` frees what the call that it is given lets go of."""
        self._executor = executor
        self._give_back = give_back
        self._captured: dict[_Kind, _CapturedForward] = {}
        self._seen: dict[_Kind, torch.Size] = {}
        """Shape of the last tokens of each kind of pass that ran uncaptured."""

    def run(
        self, schedule: Schedule, forward: MakeLogits, tokens: torch.Tensor, *, may_capture: bool
    ) -> torch.Tensor:
        """Run ``forward`` of ``tokens`` by a schedule; returns logits that the next run overwrites.

        Captures it if that is allowed, the last tokens of this phase had the same shape, and what
        is captured does not serve. That waits for the device.
        """
        phase = schedule.phase
        kind = _kind_of(phase, tokens)
        captured = self._captured.get(kind)
        is_same = captured is not None and captured.tokens.shape == tokens.shape
        if captured is not None and is_same and may_capture and captured.schedule == schedule:
            return captured.replay(tokens)
        in_the_way = captured is not None and phase is Phase.PREFILL
        del captured  # it would keep what it takes
        if may_capture and (is_same or self._seen.get(kind) == tokens.shape):
            return self._capture(schedule, forward, tokens).replay(tokens)
        if in_the_way:
            # both phases' graphs share their memory, of which this prompt is to take as much
            self._give_back(self._captured.clear)
        logits: torch.Tensor = self._executor.run(schedule, partial(forward, tokens))
        self._seen[kind] = tokens.shape
        return logits

    def invalidate(self) -> None:
        """Drop what is captured; whatever comes next runs uncaptured once."""
        self._captured.clear()
        self._seen.clear()

    def _capture(
        self, schedule: Schedule, forward: MakeLogits, tokens: torch.Tensor
    ) -> "_CapturedForward":
        kind = _kind_of(schedule.phase, tokens)
        drop = partial(self._captured.pop, kind, None)
        if schedule.phase is Phase.PREFILL:
            self._give_back(drop)  # and what the prompt took uncaptured: it takes as much again
        else:
            drop()
        # passes of the phases never run at the same time: both use the same temporary memory
        beside = next(iter(self._captured.values()), None)
        pool = torch.cuda.graph_pool_handle() if beside is None else beside.pool
        captured = _CapturedForward(schedule, tokens.clone(), pool)

        def run() -> None:
            captured.logits = forward(captured.tokens)

        captured.graphs = self._executor.capture(schedule, run, pool)
        self._captured[kind] = captured
        return captured


_Kind = tuple[Phase, tuple[int, ...]]
"""The kind of a pass, of which the last stays captured: prompts are of one, steps of one for each
shape of their tokens."""


def _kind_of(phase: Phase, tokens: torch.Tensor) -> _Kind:
    return phase, tuple(tokens.shape) if phase is Phase.DECODE else ()


@dataclass
class _CapturedForward:
    """The pass of one schedule for tokens of one shape; later ones are copied into its input."""

    schedule: Schedule
    tokens: torch.Tensor
    """Tokens that the pass reads, [batch, new]."""
    pool: Any
    """The pool that its temporary memory comes from."""
    graphs: CapturedPass = field(init=False)
    logits: torch.Tensor = field(init=False)

    def replay(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the pass; returns its logits.

        The next replay overwrites them, of this pass or of another one from the same pool.
        """
        self.tokens.copy_(tokens)
        self.graphs.replay()
        return self.logits
