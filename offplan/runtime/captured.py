"""A pass captured as CUDA graph segments, with the tensors that it reads and writes."""

from collections.abc import Callable
from typing import Any

import torch

from offplan.runtime.executor import Executor
from offplan.schedule import Schedule


class CapturedForward:
    """The pass of one schedule for tokens of one shape; later ones are copied into its input.

    Captured after a pass that ran uncaptured: libraries allocate workspaces at their first call,
    which must not happen in a capture.
    """

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        forward: Callable[[torch.Tensor], torch.Tensor],
        tokens: torch.Tensor,
        beside: "CapturedForward | None",
    ) -> None:
        """Capture ``forward`` of ``tokens``, int64 on the device, which makes logits.

        ``beside`` is a pass that never runs at the same time: both use the same temporary memory.
        """
        self.schedule = schedule
        self._tokens = tokens.clone()
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool

        def run() -> None:
            self._logits = forward(self._tokens)

        self._pass = executor.capture(schedule, run, self._pool)

    @property
    def shape(self) -> torch.Size:
        """Of the tokens, [batch, new]."""
        return self._tokens.shape

    def replay(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the pass; returns logits, [batch, vocabulary].

        The next replay overwrites them, of this pass or of one ``beside`` it.
        """
        self._tokens.copy_(tokens)
        self._pass.replay()
        return self._logits
