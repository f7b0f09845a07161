"""What exporters have in common: an engine, its versions, and what is said to it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from offplan.checkpoint.model import Model
from offplan.engines.names import EngineParameter
from offplan.errors import ExportError
from offplan.placement import Placement
from offplan.plan import Plan, Rule
from offplan.ranks import Ranks

Version = tuple[int, int, int]
Flags = Mapping[str, tuple[str, ...]]
"""Options by their name without dashes, each with its values; none is a switch."""


@dataclass(frozen=True)
class Said:
    """What makes an engine move what a rule takes, and what that takes there."""

    flags: Flags = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables without which the flags do something else."""
    notes: tuple[str, ...] = ()
    """What the flags do not promise, a sentence each."""
    moved: tuple[EngineParameter, ...] = ()
    """All that it, or one of its ranks, may move to the host."""
    more_gpu_bytes: int = 0
    """Bytes on the GPU beyond those that offplan's own runtime takes for the rule."""
    pinned_elsewhere: int = 0
    """Page-locked memory of the other ranks, where there are any."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory: torch rounds each parameter's up to a power of two.

        Source: torch 2.11, ``CachingHostAllocator``.
        """
        own = sum(1 << (each.nbytes - 1).bit_length() for each in self.moved if each.nbytes)
        return own + self.pinned_elsewhere


@dataclass(frozen=True)
class Engine:
    """An engine that plans are exported to."""

    name: str
    title: str
    oldest: Version
    newest: Version
    """The version whose real package the export is held against."""
    say: Callable[[Rule, Placement, Model, Version], Said]
    """Says a rule with one backend; raises ExportError for what the flags cannot say."""
    stay: Callable[[Model, Version], Said]
    """Says what the weights of a plan without rules take; no name needs to be known for it."""
    grow: Callable[[Model], Mapping[EngineParameter, EngineParameter]]
    """Parameters that are larger on the GPU than they are stored, as the least they are there."""
    serve: Callable[[Plan, int | None], Flags]
    """Says the rest of a plan, given the bytes of the GPU where they are known."""
    divide: Callable[[Ranks], Flags]
    """Says the ranks of a plan."""
    command: tuple[str, ...]
    """What starts it, before the model and the flags."""
    image: str
    """The container image, without its tag."""
    port: int
    bind: Flags
    """Binds each rank to the NUMA node of its GPU; empty where the engine does so by itself."""
    max_bytes_unit: int = 1
    """A rule's ``max_bytes`` is a whole number of these."""

    def parse_version(self, text: str) -> Version:
        """Read ``0.31`` or ``0.31.2``; raises ExportError for a version that is not known."""
        parts = text.split(".")
        if not (1 < len(parts) < 4 and all(part.isdecimal() for part in parts)):
            raise ExportError(f"{self.name}=={text}: write a version as {self.name}==0.31")
        major, minor, patch = (int(part) for part in (*parts, "0")[:3])
        version = major, minor, patch
        if not (self.oldest <= version and version[:2] <= self.newest[:2]):
            raise ExportError(
                f"what {self.title} {text} does with its flags is not known: offplan knows "
                f"{format_version(self.oldest)} to {format_version(self.newest)}"
            )
        return version


def format_version(version: Version) -> str:
    """Write a version as packages have it."""
    return ".".join(map(str, version))


def first_layers(parameters: Iterable[EngineParameter], num_bytes: int) -> list[EngineParameter]:
    """Return those of whole layers, from the first on, that hold so many bytes together.

    An engine that takes parameters until it has ``num_bytes`` takes no other, in whatever order it
    has those of a layer.
    """
    taken: list[EngineParameter] = []
    for each in parameters:
        if num_bytes <= 0 and each.layer != taken[-1].layer:
            break
        taken.append(each)
        num_bytes -= each.nbytes
    return taken
