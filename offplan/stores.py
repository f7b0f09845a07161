"""Stores: the memories that take what rules keep off the GPU.

Each is one record in one table, ``STORES``. Plans name it; costs, machines, reports and checks ask
the record, and none of them knows a store but the host by its name.
"""

from dataclasses import dataclass
from typing import Literal

StoreName = Literal["host", "peer"]
"""Store of what is offloaded: pinned host memory, or that of a second GPU."""


@dataclass(frozen=True)
class Link:
    """The link from a store that is not the host's memory, as a machine's profile has it."""

    name: str
    """The link's name in a plan's file."""
    rate: str
    """Key of its rate in a profile."""
    latency: str
    """Key of the seconds of one copy beside those of its bytes; absent is as from the host."""
    title: str
    """The rate's name in reports."""
    meaning: str
    """The rate in words, and where it can be measured."""


@dataclass(frozen=True)
class Store:
    """A memory that DMA copies slabs from; kernels and the host's cores reach the host's alone."""

    name: StoreName
    """Its name in a plan's file."""
    title: str
    """Its name in reports."""
    where: str
    """The place of weights that lie in it."""
    memory: str
    """The prediction's term for what it takes."""
    label: str
    """Its name in pictures."""
    link: Link | None = None
    """Its link; None for the host, whose link each profile has."""
    num_gpus: int = 1
    """GPUs that a machine with it has, at least."""

    @property
    def bytes_key(self) -> str:
        """The field of a prediction with the bytes that it takes."""
        return f"{self.memory}_bytes"

    @property
    def is_host(self) -> bool:
        """True for the host's memory."""
        return self.link is None


HOST = Store("host", "host", "in host memory", "host_memory", "Host, page-locked")
SECOND_GPU_LINK = Link(
    "peer GPU",
    "peer",
    "peer_latency",
    "peer GPU to this one, DMA",
    "the rate of copies from a second GPU: measure it where there are two",
)
_PEER = Store(
    "peer",
    "second GPU",
    "on the second GPU",
    "peer_memory",
    "Second GPU",
    SECOND_GPU_LINK,
    num_gpus=2,
)
SECOND_GPU_STORES = (
    "A second GPU's memory can hold weights: `store=peer`, with a profile that `offplan measure` "
    "wrote there"
)
"""The words on a second GPU where a plan is for one."""
STORES: dict[StoreName, Store] = {each.name: each for each in (HOST, _PEER)}
"""All stores, by name."""
