"""Servers of the backends that read weights in place: one each, registered in a table."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offplan.backends import Backend
from offplan.placement import Phase
from offplan.runtime.forms import cores, tasks
from offplan.runtime.memory.handover import Handover


class Server(Protocol):
    """Serves what one session reads in place by one backend. Works on the current stream."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that it had cross the link so far; what kernels read in place nobody counts."""

    def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a layer computes with in a phase.

        ``stored`` is the same weight in its slab, in memory that the device can read. Asked once
        for each weight before any pass; what is returned keeps its address.
        """

    def serve(self, phase: Phase, layer: int) -> None:
        """Fetch what the layer is about to compute with, where the backend ``is_served``."""

    def invalidate(self) -> None:
        """Rely on nothing that a pass has begun: it may have been aborted."""

    def check(self) -> None:
        """Raise OffplanError if what was served since the session began may be wrong."""

    def close(self) -> None:
        """Give memory back; the device is idle."""


class InPlace:
    """Has kernels read host memory where it lies."""

    bytes_moved = 0

    def __init__(self, device: torch.device) -> None:
        """Need nothing of the device."""

    def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
        """Return the weight in its slab."""
        return stored

    def serve(self, phase: Phase, layer: int) -> None:
        """Do nothing: no schedule asks for it."""

    def invalidate(self) -> None:
        """Do nothing: kernels leave nothing begun."""

    def check(self) -> None:
        """Find nothing: kernels that fail end their pass."""

    def close(self) -> None:
        """Do nothing: it took no memory."""


class ByCores(InPlace):
    """Has the host's cores multiply weights where they lie; what is no matrix is read in place.

    Which modules these are is found by ``runtime.loading.by_cores``.
    """

    def __init__(self, device: torch.device, num_threads: int | None = None) -> None:
        """Load the library, compiled first where it is not there yet; raises OffplanError."""
        on_gpu = device.type == "cuda"
        self._handover = Handover(device, num_threads=num_threads) if on_gpu else None
        library = cores.load()
        self._kernels = library.kernels()
        self._team = library.team_of_caller(num_threads or torch.get_num_threads())

    @property
    def num_threads(self) -> int:
        """Threads that compute where the device is the CPU."""
        return self._team.num_threads

    def multiply(self, weight: cores.Matrix, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, bfloat16 of [rows, in], by a weight: bfloat16 of [rows, out]."""
        if self._handover is not None:
            return self._handover.multiply(weight, x)
        return cores.multiply(self._team, self._kernels, weight, x)

    def send(self, experts: cores.Experts, *arguments: torch.Tensor) -> torch.Tensor:
        """Send tokens through their experts, as ``cores.send`` does."""
        if self._handover is not None:
            return self._handover.send(experts, *arguments)
        return cores.send(self._team, self._kernels, experts, *arguments)

    def begin(self, experts: cores.Experts, *arguments: torch.Tensor) -> Any:
        """Begin to send tokens as ``send`` does; ``end`` is given what this returns.

        A pair whose expert is -1 is left out. Nothing else is begun before it is ended.
        """
        if self._handover is not None:
            return self._handover.begin(experts, *arguments)
        return self.send(experts, *arguments)

    def begin_by(self, experts: cores.Experts, sizes: Sequence[int], launch: tasks.Launch) -> Any:
        """Begin to send so many tokens to so many experts each, which a kernel writes.

        A GPU only; otherwise as ``begin``.
        """
        assert self._handover is not None, "kernels write for a GPU"
        return self._handover.begin_by(experts, sizes, launch)

    def end(self, begun: Any, made: torch.Tensor) -> torch.Tensor:
        """Add to ``made``, [tokens, hidden], the sums of the experts that were sent to."""
        return made + begun if self._handover is None else self._handover.end(begun, made)

    def invalidate(self) -> None:
        """Take it that a product was begun which nobody waits for."""
        if self._handover is not None:
            self._handover.exchange.invalidate()

    def check(self) -> None:
        """Raise OffplanError if a product has failed, whose tokens are then wrong."""
        if self._handover is not None:
            self._handover.check()

    def close(self) -> None:
        """End the threads; the device is idle."""
        if self._handover is not None:
            self._handover.close()
        self._team.close()


SERVERS: dict[Backend, Callable[[torch.device], Server]] = {
    Backend.UVA: InPlace,
    Backend.HOST: ByCores,
}
"""Server of each backend that reads in place on a device; the ring serves those that stream."""
