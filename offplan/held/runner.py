"""What offplan asks of whatever runs a plan: its own runtime, or an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from offplan.backends import BACKENDS, Backend
from offplan.checkpoint.model import Model
from offplan.held.layout import AS_STORED, Layout
from offplan.plan import Offload, Plan

if TYPE_CHECKING:
    from offplan.checkpoint.parameter import Parameter
    from offplan.checkpoint.tables import Table
    from offplan.held.held import Held
    from offplan.held.stage import Stage


@dataclass(frozen=True)
class PassRules:
    """How an engine runs a pass; ``costs.engine_times`` has what all engines do alike."""

    copies_in_place: bool
    """Whether the engine copies what it is told to read in place, each layer before it runs."""
    allocates_copies: bool
    """Whether the engine allocates each copy anew, and only then frees the layer that has run,
    which holds one slot of the ring. After the last layers it then copies the first ones in their
    order; elsewhere each slot is filled again by the first of its own layers."""
    copies_first_again: bool
    """Whether a captured step copies again what the step before it has left in the ring."""
    shares_blocks: bool
    """Whether caches of all layers lie in blocks of one size (``vllm_cache``)."""
    num_pools: int = 1
    """Pools of GPU memory that hold the engine's copies."""
    beside_percent: int | None = None
    """What a captured step's copies take, in percent of the link's time for them, while layers run
    beside them; None where nothing is computed while a layer is copied."""
    copy_gap_ps: int = 0
    """Picoseconds that each such copy takes besides, to begin behind a layer and to be awaited."""
    layer_overhead_s: float | None = None
    """Seconds that a layer's launches and small kernels take; None for the machine's figure."""
    routed_overhead_s: float = 0.0
    """Seconds that routed experts add to that."""
    all_reduce_s: float = 0.0
    """Seconds that ranks of tensor parallelism take to add up what they computed, which they do
    twice in a layer."""

    def step_copy_ps(self, copy_ps: int) -> int:
        """Return the picoseconds in a captured step of a copy that takes so many alone."""
        if self.beside_percent is None:
            return copy_ps
        return copy_ps * self.beside_percent // 100 + self.copy_gap_ps

    def overhead_s(self, *, is_routed: bool, num_ranks: int) -> float | None:
        """Return the seconds that a layer takes beside its roofline; None for the machine's."""
        if self.layer_overhead_s is None:
            return None
        exchanging = 2 * self.all_reduce_s if num_ranks > 1 else 0.0
        return self.layer_overhead_s + is_routed * self.routed_overhead_s + exchanging

    def slots_ahead(self, num_slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of a ring's slots are filled ahead of the layer that runs."""
        return np.maximum(1, num_slots - self.allocates_copies)


class Demand(Protocol):
    """What a runner takes for a plan beside the plan's own terms."""

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
    def is_stock(self) -> bool:
        """Whether offplan's runtime runs transformers' own passes by the plan's schedule."""

    @property
    def takes_one_rule(self) -> bool:
        """Whether a plan has one rule at most, with one backend in both phases."""

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends that it executes."""

    def places_tables(self, tables: Sequence["Table"]) -> bool:
        """Whether these may lie on the host, all of a model's."""

    @property
    def holds_packed(self) -> bool:
        """Whether it holds weights packed without loss."""

    def choose_packed(self, stage: "Stage", weights: Sequence["Parameter"]) -> set[int]:
        """Return the identities of those of a stage's weights that it can hold packed.

        ``weights`` are matrices whose own types and sizes allow it.
        """

    @property
    def max_bytes_unit(self) -> int:
        """A rule's ``max_bytes`` is a whole number of these."""

    def require_served(self, model: Model, context: int) -> None:
        """Raise ExportError for a model or a context, in tokens, that the runner does not serve."""

    def lay_out(self, stage: "Stage") -> Layout:
        """Return how the runner lays out the weights of a stage."""

    def demand(self, offload: Offload, held: "Held") -> Demand:
        """Return what the runner takes for a decision; raises ExportError if it cannot run it."""

    def checker(self, held: "Held") -> Callable[[Offload], Demand | None] | None:
        """Return what demands, or None for a decision that it cannot run; None if it runs all."""

    def note_memory(self, plan: Plan, held: "Held") -> list[str]:
        """Say what memory the runner takes beyond a plan's, a sentence each."""


@dataclass(frozen=True)
class _NoDemand:
    pinned_bytes: int = 0
    more_gpu_bytes: int = 0


class OwnRuntime:
    """offplan's own runtime, which runs every plan as it is priced."""

    name = None
    pass_rules = None
    is_stock = False
    takes_one_rule = False
    holds_packed = True
    max_bytes_unit = 1

    def places_tables(self, tables: Sequence["Table"]) -> bool:
        """Place any."""
        return True

    def choose_packed(self, stage: "Stage", weights: Sequence["Parameter"]) -> set[int]:
        """Return all of them."""
        return set(map(id, weights))

    @property
    def backends(self) -> Sequence[Backend]:
        """All that a plan may have without being asked for."""
        return tuple(each for each in BACKENDS.values() if each.is_usual)

    def require_served(self, model: Model, context: int) -> None:
        """Refuse nothing: a session says what it cannot run."""

    def lay_out(self, stage: "Stage") -> Layout:
        """Return that weights lie as they are held."""
        return AS_STORED

    def demand(self, offload: Offload, held: "Held") -> Demand:
        """Return that nothing comes on top of the plan's terms."""
        return _NoDemand()

    def checker(self, held: "Held") -> None:
        """Check nothing: it runs every decision."""

    def note_memory(self, plan: Plan, held: "Held") -> list[str]:
        """Say nothing: a plan's terms are all that it takes."""
        return []


class StockRuntime(OwnRuntime):
    """offplan's own runtime where it runs transformers' own passes: it moves weights, no more."""

    is_stock = True
    holds_packed = False

    def note_memory(self, plan: Plan, held: "Held") -> list[str]:
        """Say by which passes the model runs, and what is not priced of them."""
        notes = ["transformers' own passes run this model, uncaptured; offplan moves its weights"]
        passes = held.stage.passes
        if passes is not None and (calls := passes.describe_calls()) is not None:
            notes.append(calls)
        return notes


OWN_RUNTIME: Runner = OwnRuntime()
STOCK_RUNTIME: Runner = StockRuntime()
