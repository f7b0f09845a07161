"""Every question's goal; capabilities add keys of their own in subclasses.

Each answers for its keys, and asks the others by ``super()``.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from offplan.capabilities.way import OWN, Way
from offplan.choices import ObjectiveName
from offplan.records import ExactSeconds, Record
from offplan.stores import StoreName
from offplan.units import format_seconds

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model


class Asked(NamedTuple):
    """A question's subject, beside its goal."""

    model: "Model"
    batch: int
    """Sequences of a step; 1 where the plan chooses how many."""
    store: StoreName
    no_cores: str | None = None
    """Why the machine's own cores cannot multiply; None if they can."""


class GoalBase(Record):
    """The aim of a plan, and the limits that it must keep beside the budget."""

    objective: ObjectiveName = "latency"
    """``latency``: the time of one request at the workload's batch; ``throughput``: tokens a
    second, the plan's batch being chosen for it."""
    max_ttft_s: ExactSeconds | None = Field(default=None, alias="max_ttft")
    """Seconds to the first token, at most; null where any time will do."""
    max_tpot_s: ExactSeconds | None = Field(default=None, alias="max_tpot")
    """Seconds of a decode step, at most; null where any time will do."""
    engine: str | None = None
    """The engine whose flags must be able to say the plan; null for offplan's own runtime."""

    @model_validator(mode="after")
    def _suits_engine(self) -> Self:
        for key, why in self.list_unsaid():
            if self.engine is not None:
                value = getattr(self, key)
                asked = key if value is True else f"{key}={value}"
                raise ValueError(
                    f"`{asked}` with `engine={self.engine}`: {why}; leave one of them out"
                )
        return self

    @property
    def targets(self) -> str:
        """The targets as the command line says them; empty where there are none."""
        named = (("--max-ttft", self.max_ttft_s), ("--max-tpot", self.max_tpot_s))
        return " and ".join(f"{name} {format_seconds(s)}" for name, s in named if s is not None)

    @property
    def way(self) -> Way:
        """The passes that run the model where offplan's own runtime does."""
        return OWN

    @property
    def is_own(self) -> bool:
        """True if no engine and no other passes than offplan's own run the plan."""
        return self.engine is None and self.way.is_own

    def list_unsaid(self) -> Iterator[tuple[str, str]]:
        """Yield each key that is asked for and that no engine's flags can say, and why."""
        yield from ()

    def list_refusals(self, asked: Asked) -> Iterator[str]:
        """Yield why no plan can answer, each with the key in backquotes."""
        yield from ()

    @property
    def claims_experts(self) -> bool:
        """True if rules may take routed experts by a capability's options alone."""
        return False

    def choose(self, asked: Asked, *, by_others: bool) -> dict[str, Any]:
        """Return the values of keys that were left out and whose default depends on the model.

        ``by_others`` says that other passes than offplan's own run the plan.
        """
        return {}

    def describe(self) -> Iterator[str]:
        """Yield what is asked for, each in a line of a plan's report."""
        yield from ()
