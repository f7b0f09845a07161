"""Servers of the backends that read weights in place: one each, registered in a table."""

from collections.abc import Callable

import torch
from torch import nn

from offplan.backends import Backend
from offplan.placement import Phase


class Server:
    """Serves what one session reads in place by one backend: kernels read it where it lies.

    A server that does more overrides what it does. Works on the current stream.
    """

    bytes_moved = 0
    """Bytes that it had cross the link so far; what kernels read in place nobody counts."""

    def __init__(self, device: torch.device) -> None:
        """Serve what is read on a device."""

    def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a layer computes with in a phase.

        ``stored`` is the same weight in its slab, in memory that the device can read. Asked once
        for each weight before any pass; what is returned keeps its address.
        """
        return stored

    def serve(self, phase: Phase, layer: int) -> None:
        """Fetch what the layer is about to compute with, where the backend ``is_served``."""

    def invalidate(self) -> None:
        """Rely on nothing that a pass has begun: it may have been aborted."""

    def check(self) -> None:
        """Raise OffplanError if what was served since the session began may be wrong."""

    def close(self) -> None:
        """Give memory back; the device is idle."""


SERVERS: dict[Backend, Callable[[torch.device], Server]] = {Backend.UVA: Server}
"""Server of each backend that reads in place, beside those that executors of capabilities have. The
ring serves backends that stream."""
