"""Passes captured as CUDA graph segments, with the tensors that they read and write."""

from collections.abc import Callable
from functools import partial

import torch

from offplan.placement import Phase
from offplan.runtime.executor import Executor
from offplan.schedule import Schedule

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Makes logits, [batch, vocabulary], of tokens, int64 of shape [batch, new] on the device."""


class Passes:
    """Runs passes: as they are at first, captured when they come again.

    Libraries allocate workspaces at their first call, which must not happen in a capture. What is
    captured keeps the temporary memory that it takes: a step always, a prompt until another one
    comes.
    """

    def __init__(self, executor: Executor, give_back_temporaries: Callable[[], None]) -> None:
        self._executor = executor
        self._give_back_temporaries = give_back_temporaries
        self._captured: dict[Phase, _CapturedForward] = {}
        self._seen: dict[Phase, torch.Size] = {}
        """Shape of the last tokens that ran uncaptured."""

    @property
    def captured(self) -> set[Phase]:
        """Phases of which a pass is captured."""
        return set(self._captured)

    def run(
        self, schedule: Schedule, forward: Forward, tokens: torch.Tensor, *, may_capture: bool
    ) -> torch.Tensor:
        """Run ``forward`` of ``tokens`` by a schedule; returns logits that the next run overwrites.

        Captures it if that is allowed, the last tokens of this phase had the same shape, and what
        is captured does not serve. That waits for the device.
        """
        phase = schedule.phase
        captured = self._captured.get(phase)
        is_same = captured is not None and captured.shape == tokens.shape
        if captured is not None and is_same and may_capture and captured.schedule == schedule:
            return captured.replay(tokens)
        capture = may_capture and (is_same or self._seen.get(phase) == tokens.shape)
        is_stale = captured is not None and phase is Phase.PREFILL
        del captured  # it would keep what it takes
        if capture or is_stale:
            self._make_room(phase)
        if capture:
            self._captured[phase] = _CapturedForward(self._executor, schedule, forward, tokens)
            return self._captured[phase].replay(tokens)
        logits = self._executor.run(schedule, partial(forward, tokens))
        assert isinstance(logits, torch.Tensor)
        self._seen[phase] = tokens.shape
        return logits

    def _make_room(self, phase: Phase) -> None:
        """Give back what the last pass took: of a prompt, captured or not, the next takes as much.

        A step's is little, and what it took uncaptured serves the prompt.
        """
        self._captured.pop(phase, None)
        if phase is Phase.PREFILL:
            self._give_back_temporaries()

    def forget(self) -> None:
        """Drop what is captured, and the memory that it keeps."""
        self._captured.clear()


class _CapturedForward:
    """The pass of one schedule for tokens of one shape; later ones are copied into its input."""

    def __init__(
        self, executor: Executor, schedule: Schedule, forward: Forward, tokens: torch.Tensor
    ) -> None:
        """Capture ``forward`` of ``tokens``."""
        self.schedule = schedule
        self._tokens = tokens.clone()

        def run() -> None:
            self._logits = forward(self._tokens)

        self._pass = executor.capture(schedule, run)

    @property
    def shape(self) -> torch.Size:
        """Of the tokens, [batch, new]."""
        return self._tokens.shape

    def replay(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the pass; returns logits, [batch, vocabulary].

        The next replay overwrites them.
        """
        self._tokens.copy_(tokens)
        self._pass.replay()
        return self._logits
