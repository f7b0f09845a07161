"""Every plan's decision; capabilities add keys of their own in subclasses."""

from collections.abc import Iterator
from typing import Any, Literal

from offplan.capabilities.rule import Count
from offplan.records import Record
from offplan.stores import StoreName


class OffloadBase(Record):
    """The decision itself."""

    prefetch_step: Count = 1
    """Slots in the ring."""
    prefill_chunk: Count
    """Prompt tokens of each sequence in one forward pass, at most."""
    embeddings: Literal["device", "host"] = "device"
    """``host``: tables that passes read by row stay in pinned host memory, and are read in place.
    They are an input embedding that no head is tied to, Gemma's embedding for each layer, and the
    like."""
    store: StoreName = "host"
    """The place of what the rules take: pinned host memory, or that of a second GPU."""

    def list_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the steps of its keys in words, and the keys that each changes."""
        yield from ()

    def list_capabilities(self) -> Iterator[str]:
        """Yield the capabilities that execute it, by the names of their executors."""
        if self.store != "host":
            yield self.store
