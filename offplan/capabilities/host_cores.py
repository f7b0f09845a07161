"""The host's cores: they multiply what rules take where it lies, in decode."""

from collections.abc import Iterator

from pydantic import model_validator
from typing_extensions import Self

from offplan.backends import Backend
from offplan.capabilities.goal import GoalBase
from offplan.capabilities.rule import Count


class HostCoresGoal(GoalBase):
    """A question whose plans may have the host's cores multiply."""

    host_cores: bool = False
    """True lets rules have the host's cores multiply what they take (``decode: host``)."""
    host_threads: Count | None = None
    """Threads that the host's cores compute with; null for those of the profile's figures."""

    @model_validator(mode="after")
    def _has_cores(self) -> Self:
        if self.host_threads is not None and not self.host_cores:
            raise ValueError(
                f"`host_threads={self.host_threads}` without `host_cores`, which lets the host's "
                "cores multiply: add `host_cores`, or leave `host_threads` out"
            )
        return self

    @property
    def more_backends(self) -> tuple[Backend, ...]:
        """Backends that plans may have beside those of what runs them."""
        return (Backend.HOST,) if self.host_cores else ()

    def without_cores(self) -> Self:
        """Return the same goal with the host's cores left out."""
        return self.model_copy(update={"host_cores": False, "host_threads": None})

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield the cores, where they are asked for."""
        yield from super().list_unsaid()
        if self.host_cores:
            yield "host_cores", "no engine's flags have the host's cores multiply weights"
