"""The server of what the host's cores multiply where it lies, for a device that shares memory."""

from collections.abc import Sequence
from typing import Any

import torch

from offplan.hostcores.build import name_source
from offplan.hostcores.coordinator import Spent
from offplan.runtime.forms import tasks
from offplan.runtime.host_cores import cores
from offplan.runtime.memory.store import Server


class ByCores(Server):
    """Has the calling thread's cores multiply weights; what is no matrix is read in place.

    Which modules these are is found by ``executor``. ``Handover`` does the same for a GPU.
    """

    num_threads: int
    """Threads that compute."""
    kernels: int
    """Address of the kernels that they compute by."""

    def __init__(self, device: torch.device, num_threads: int | None = None) -> None:
        """Load the library, compiled first where it is not there yet; raises OffplanError."""
        library = cores.load()
        self.kernels = library.kernels()
        self._own_team = library.team_of_caller(num_threads or torch.get_num_threads())
        self.num_threads = self._own_team.num_threads

    @property
    def key(self) -> dict[str, Any]:
        """Name what times of its products depend on, as plain JSON."""
        return {"threads": self.num_threads, "library": name_source()}

    def multiply(self, weight: cores.Matrix, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, bfloat16 of [rows, in], by a weight: bfloat16 of [rows, out]."""
        return cores.multiply(self._own_team, self.kernels, weight, x)

    def send(self, experts: cores.Experts, *arguments: torch.Tensor) -> torch.Tensor:
        """Send tokens through their experts, as ``cores.send`` does."""
        return cores.send(self._own_team, self.kernels, experts, *arguments)

    def begin(self, experts: cores.Experts, *arguments: torch.Tensor) -> Any:
        """Begin to send tokens as ``send`` does; ``end`` is given what this returns.

        A pair whose expert is -1 is left out. Nothing else is begun before it is ended.
        """
        return self.send(experts, *arguments)

    def begin_by(self, experts: cores.Experts, sizes: Sequence[int], launch: tasks.Launch) -> Any:
        """Begin to send so many tokens to so many experts each, which a kernel writes.

        A GPU only; otherwise as ``begin``.
        """
        raise NotImplementedError

    def end(self, begun: Any, made: torch.Tensor) -> torch.Tensor:
        """Add to ``made``, [tokens, hidden], the sums of the experts that were sent to."""
        return made + begun

    def bring_later(
        self, experts: cores.Experts, parts: Sequence[tuple[int, int, int]], done: int
    ) -> torch.Tensor:
        """Have experts that a kernel lists be copied into slots, behind each product of a layer.

        A GPU only: on the CPU whoever lists them copies them.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Have the next product begun at once, though none was asked for a while."""

    def drain(self) -> None:
        """Wait until the current stream, the cores and the copies that they make are idle."""

    def time_experts(self, experts: cores.Experts, chosen: Sequence[int], room: int) -> float:
        """Time an exchange of one row that chooses experts, ``room`` at most; a GPU only."""
        raise NotImplementedError

    def count(self) -> Spent | None:
        """Return what the coordinator has spent; None if there is none."""
        return None

    def keep(self, owner: object) -> None:
        """Keep what addresses of tasks point to, for as long as a thread may read there.

        On the CPU nothing is read once a product has come back.
        """

    def close(self) -> None:
        """End the threads; the device is idle."""
        self._own_team.close()
