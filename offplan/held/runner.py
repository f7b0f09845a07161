"""The protocol of whatever runs a plan: offplan's own runtime, or an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offplan.backends import BACKENDS, Backend
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import Table
from offplan.held.counted import CountedPasses
from offplan.held.layout import AS_STORED, Layout, PassRules
from offplan.held.stage import Stage
from offplan.plan import Offload, Plan

Counter = Callable[[Model], CountedPasses | str]
"""Counts what the passes of a model take, or returns why it cannot."""


class Demand(Protocol):
    """The memory that a runner takes for a plan beside the plan's own terms."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory, in bytes."""

    @property
    def more_gpu_bytes(self) -> int:
        """Bytes on the GPU beyond those that offplan's own runtime takes."""


class Runner(Protocol):
    """Whatever runs a plan. A question is handed one; costs and planner import none."""

    @property
    def name(self) -> str | None:
        """The name that a goal has for it: ``vllm==0.31``; None is offplan's own runtime."""

    @property
    def pass_rules(self) -> PassRules | None:
        """How an engine runs a pass; None where the plan's own schedule is executed."""

    @property
    def takes_one_rule(self) -> bool:
        """True if a plan has one rule at most, with one backend in both phases."""

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends that it executes."""

    def places_tables(self, tables: Sequence[Table]) -> bool:
        """Return True if these may lie on the host, all of a model's."""

    @property
    def holds_packed(self) -> bool:
        """True if it holds weights packed without loss."""

    def choose_packed(self, stage: Stage, weights: Sequence[Parameter]) -> set[int]:
        """Return the identities of those of a stage's weights that it can hold packed.

        ``weights`` are matrices whose own types and sizes allow it.
        """

    @property
    def max_bytes_unit(self) -> int:
        """A rule's ``max_bytes`` is a whole number of these."""

    def require_served(self, model: Model, context: int) -> None:
        """Raise ExportError for a model or a context, in tokens, that the runner does not serve."""

    def lay_out(self, stage: Stage) -> Layout:
        """Return how the runner lays out the weights of a stage."""

    def demand(self, offload: Offload, stages: Sequence[Stage]) -> Demand:
        """Return what the runner takes for a decision; raises ExportError if it cannot run it."""

    def note_memory(self, plan: Plan, stages: Sequence[Stage]) -> list[str]:
        """Say what memory the runner takes beyond a plan's, a sentence each."""


@dataclass(frozen=True)
class _NoDemand:
    pinned_bytes: int = 0
    more_gpu_bytes: int = 0


class OwnRuntime:
    """offplan's own runtime, which runs every plan as it is priced.

    A subclass runs other passes than offplan's own. ``runtimes`` has the table.
    """

    name = None
    pass_rules = None
    takes_one_rule = False
    holds_packed = True
    max_bytes_unit = 1

    def count(self, model: Model, here: Counter | None = None) -> CountedPasses | None:
        """Return what the passes of a model take; None where formulas say it.

        ``here`` counts in this process; left out, a process of its own does. Raises CheckpointError
        where that cannot be counted.
        """
        return None

    def places_tables(self, tables: Sequence[Table]) -> bool:
        """Place any."""
        return True

    def choose_packed(self, stage: Stage, weights: Sequence[Parameter]) -> set[int]:
        """Return all of them."""
        return set(map(id, weights))

    @property
    def backends(self) -> Sequence[Backend]:
        """All that a plan may have without being asked for."""
        return tuple(each for each in BACKENDS.values() if each.is_usual)

    def require_served(self, model: Model, context: int) -> None:
        """Refuse nothing: a session says what it cannot run."""

    def lay_out(self, stage: Stage) -> Layout:
        """Return that weights lie as they are held."""
        return AS_STORED

    def demand(self, offload: Offload, stages: Sequence[Stage]) -> Demand:
        """Return that nothing comes on top of the plan's terms."""
        return _NoDemand()

    def note_memory(self, plan: Plan, stages: Sequence[Stage]) -> list[str]:
        """Say nothing: a plan's terms are all that it takes."""
        return []


OWN_RUNTIME = OwnRuntime()
