"""The host's cores: they multiply what rules take where it lies, in decode."""

from collections.abc import Iterator
from typing import Any

from pydantic import model_validator
from typing_extensions import Self

from offplan.backends import Backend
from offplan.capabilities.goal import Asked, GoalBase
from offplan.capabilities.rule import Count

DEFAULT_HOST_CORES = True
"""Default of ``host_cores``: plans may have the host's cores multiply.

Source: an H200's host, ``benchmarks/results/cores-by-default-h200.json``: a token of gpt-oss-20b in
8 GiB 16.9 -> 11.4 ms, its first token 111 -> 148.
"""


class HostCoresGoal(GoalBase):
    """A question whose plans may have the host's cores multiply."""

    host_cores: bool = False
    """True lets rules have the host's cores multiply what they take (``decode: host``)."""
    host_threads: Count | None = None
    """Threads that the host's cores compute with; null for those of the profile's figures."""

    @model_validator(mode="after")
    def _has_cores(self) -> Self:
        is_off = "host_cores" in self.model_fields_set and not self.host_cores
        if self.host_threads is not None and is_off:
            raise ValueError(
                f"`host_threads={self.host_threads}` with `host_cores=False`, which lets the "
                "host's cores multiply nothing: leave one of them out"
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
        for key in ("host_cores", "host_threads"):
            if getattr(self, key):
                yield key, "no engine's flags have the host's cores multiply weights"

    def why_left_out(self, asked: Asked) -> str | None:
        """Say why the cores are left out of plans, though they may be wanted; else None."""
        return None if self.host_cores else why_no_cores(asked)

    def choose(self, asked: Asked, *, by_others: bool) -> dict[str, Any]:
        """Choose DEFAULT_HOST_CORES where the host's cores can multiply."""
        chosen = super().choose(asked, by_others=by_others)
        if "host_cores" not in self.model_fields_set:
            can = not by_others and why_no_cores(asked) is None
            chosen["host_cores"] = DEFAULT_HOST_CORES and can
            if not chosen["host_cores"]:
                chosen["host_threads"] = None
        return chosen


def why_no_cores(asked: Asked) -> str | None:
    """Say why the host's cores multiply nothing in a question's plans; None if they may."""
    if asked.no_cores is not None:
        return asked.no_cores
    if asked.store != "host":
        return f"the store is {asked.store}, which they do not read"
    if asked.model.dtype != "bfloat16":
        return f"they compute in bfloat16, and {asked.model.source} in {asked.model.dtype}"
    return None
