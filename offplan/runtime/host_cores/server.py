"""The server of what the host's cores multiply where it lies."""

from collections.abc import Sequence
from typing import Any

import torch

from offplan.hostcores.build import name_source
from offplan.hostcores.coordinator import Spent
from offplan.runtime.forms import tasks
from offplan.runtime.host_cores import cores
from offplan.runtime.host_cores.handover import Handover
from offplan.runtime.memory.store import Server


class ByCores(Server):
    """Has the host's cores multiply weights where they lie; what is no matrix is read in place.

    Which modules these are is found by ``executor``.
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
        """Threads that compute."""
        return self._team.num_threads if self._handover is None else self._handover.num_threads

    @property
    def key(self) -> dict[str, Any]:
        """Name what times of its products depend on, as plain JSON."""
        return {"threads": self.num_threads, "library": name_source()}

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

    def bring_later(
        self, experts: cores.Experts, parts: Sequence[tuple[int, int, int]], done: int
    ) -> torch.Tensor:
        """Have experts be copied into slots behind products, as ``Handover.bring_later`` does.

        A GPU only: on the CPU whoever lists them copies them.
        """
        assert self._handover is not None, "a driver copies to a GPU"
        return self._handover.bring_later(experts, parts, done)

    def wake(self) -> None:
        """Have the next product begun at once, though none was asked for a while."""
        if self._handover is not None:
            self._handover.wake()

    def drain(self) -> None:
        """Wait until the current stream, the cores and the copies that they make are idle."""
        if self._handover is not None:
            self._handover.drain()

    def time_experts(self, experts: cores.Experts, chosen: Sequence[int], room: int) -> float:
        """Time an exchange with the cores, as ``Handover.time_experts`` does; a GPU only."""
        assert self._handover is not None, "there is no exchange"
        return self._handover.time_experts(experts, chosen, room)

    def count(self) -> Spent | None:
        """Return what the coordinator has spent; None if there is none."""
        return None if self._handover is None else self._handover.count()

    def keep(self, owner: object) -> None:
        """Keep what addresses of tasks point to, for as long as a thread may read there.

        On the CPU nothing is read once a product has come back.
        """
        if self._handover is not None:
            self._handover.keep(owner)

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
            self.hangs = not self._handover.close()
        self._team.close()
