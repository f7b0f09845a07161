"""Notes, on the device, which experts each decode step chooses."""

from typing import Any

import numpy as np
import torch
from torch import nn

from offplan.routing.use_order import Steps
from offplan.transformers_private import list_experts

MOST_STEPS = 1024
"""Steps that are noted on the device before the host fetches them, which waits for the device."""


class RoutingRecorder:
    """Keeps the experts that decode steps choose in each layer that routes.

    A layer writes its choices to the place that a number on the device names: a captured step
    writes them as well. A prompt of one token writes to the same place, and the next step
    overwrites what it wrote.
    """

    def __init__(self, layers: nn.ModuleList, num_chosen: int, device: torch.device) -> None:
        """Watch the routed experts in ``layers``, before the layers are compiled.

        A token chooses ``num_chosen`` experts in each of them.
        """
        self.layers: list[int] = []
        """Indices of the layers that have routed experts."""
        self._experts: list[nn.Module] = []
        self._num_chosen = num_chosen
        self._batch = 0
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_noted = 0
        self._fetched: list[Steps] = []
        for index, layer in enumerate(layers):
            for experts in list_experts(layer):
                self.layers.append(index)
                self._experts.append(experts)
                vars(experts).update(routing_log=None, routing_step=self._step)
                experts.register_forward_pre_hook(_note)

    @property
    def steps(self) -> list[Steps]:
        """The routing noted for each run of equal batches; waits for the device."""
        self._fetch()
        return self._fetched

    def forget(self) -> None:
        """Forget what was noted: steps that only warmed up."""
        self._fetch()
        self._fetched.clear()

    def begin(self, batch: int) -> None:
        """Make room for steps of so many sequences, before anything of them is captured."""
        if batch == self._batch:
            return
        self._fetch()
        self._batch = batch
        shape = MOST_STEPS, batch, self._num_chosen
        for experts in self._experts:
            log = torch.zeros(shape, dtype=torch.int16, device=self._step.device)
            vars(experts)["routing_log"] = log

    def note_step(self) -> None:
        """Count a step that was queued; fetches all that was noted once there is no more room.

        Rows without a text are sent where the first one with a text is, and are noted so.
        """
        self._num_noted += 1
        self._step.fill_(self._num_noted)
        if self._num_noted == MOST_STEPS:
            self._fetch()

    def _fetch(self) -> None:
        if self._num_noted:
            logs = [vars(experts)["routing_log"][: self._num_noted] for experts in self._experts]
            steps = torch.stack(logs, dim=1).cpu().numpy()
            if self._fetched and self._fetched[-1].shape[1:] == steps.shape[1:]:
                steps = np.concatenate([self._fetched.pop(), steps])
            self._fetched.append(steps)
        self._num_noted = 0
        self._step.zero_()


def _note(experts: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Write the choices that experts are called with, [tokens, choices], into their log."""
    log, chosen = vars(experts)["routing_log"], arguments[1]
    if log is not None and chosen.numel() == log[0].numel():
        place = vars(experts)["routing_step"]
        log.index_copy_(0, place, chosen.reshape(log.shape[1:]).to(log.dtype).unsqueeze(0))
