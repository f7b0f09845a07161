"""GPU memory of the experts that a rule keeps there one by one: their slots, and a table a layer.

Costs, planner and runtime ask here for the bytes. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offplan.checkpoint.model import Layer
from offplan.errors import PlanError
from offplan.forms.form import Kind, Part
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.plan import Rule
from offplan.routed_experts import require_experts

BOUNDARY_BYTES = 256
"""Every part of the slots, and the table, starts on such a boundary."""
COUNTERS = 32
"""Numbers of a table beside those of its lists."""
LISTS = 5
"""Numbers that a table has for each expert of its layer."""
_DOWN = {"down_proj", "output_linear", "w2"}
"""Names of the projection whose inputs are an expert's inner columns."""


class Division(NamedTuple):
    """The part of a layer's missed experts that the host's cores multiply in a step."""

    experts: int
    """Whole experts."""
    chunks: int
    """Chunks of one expert more: the first CHUNK_COLUMNS of its inner columns, so many times."""


@dataclass(frozen=True)
class ExpertSlots:
    """The slots of one layer: room in GPU memory for some of its experts, all parts of each."""

    num_slots: int
    """Experts that there is room for."""
    num_experts: int
    """Experts of the layer."""
    units: tuple[Unit, ...]
    """Everything that is stored of the layer's experts, in the slab's order."""
    host_share: float = 0.0
    """Part of the experts that a step misses which the host's cores multiply where they lie."""
    inner: int = 0
    """Inner columns of an expert that cores and link split; 0 if they split none."""

    @property
    def splits(self) -> bool:
        """True if cores and link each multiply a part of one missed expert.

        The link brings its part into the last slot, where no expert is kept.
        """
        return self.num_slots > 1 and self.inner > 0

    @property
    def num_kept(self) -> int:
        """Experts that are kept from step to step."""
        return self.num_slots - self.splits

    def divide(self, num_missed: int) -> Division:
        """Divide so many experts that a layer misses in a step: the cores get ``host_share``.

        An expert is split by whole chunks; if none is split, the share is rounded.
        """
        wanted = self.host_share * num_missed
        if not self.splits:
            return Division(math.floor(wanted + 0.5), 0)
        experts = math.floor(wanted)
        chunks = round((wanted - experts) * self.inner / CHUNK_COLUMNS)
        is_whole = chunks * CHUNK_COLUMNS >= self.inner
        return Division(experts + is_whole, 0 if is_whole else chunks)

    def count_by_cores(self, experts: int, chunks: int) -> float:
        """Count the experts that a ``Division`` gives the cores, a part of one as that part."""
        return experts + (chunks * CHUNK_COLUMNS / self.inner if chunks else 0.0)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert: what each miss has cross the link."""
        return sum(unit.nbytes for unit in self.units) // self.num_experts

    @cached_property
    def slots_bytes(self) -> int:
        """Bytes of the slots, each part on a boundary."""
        of_each = (unit.nbytes // self.num_experts * self.num_slots for unit in self.units)
        return sum(map(_align, of_each))

    @property
    def table_bytes(self) -> int:
        """Bytes of the table that says which expert is in which slot, in the order of use."""
        return table_bytes(self.num_experts)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the layer's slots and table take."""
        return self.slots_bytes + self.table_bytes


@dataclass(frozen=True)
class ExpertsFound:
    """The chosen experts that a decode step hits and misses, over all layers that keep some.

    An expert counts once a step and layer, however many tokens chose it.
    """

    hits: float
    """Experts that were in GPU memory, or are predicted to be."""
    misses: float
    """Experts that were not."""
    by_cores: float = 0.0
    """Experts of these that the host's cores multiplied where they lie."""

    @property
    def brought(self) -> float:
        """Experts of these that were read over the link."""
        return self.misses - self.by_cores


def table_bytes(num_experts: int) -> int:
    """Bytes of a layer's table: numbers of 4 bytes."""
    return _align(4 * (LISTS * num_experts + COUNTERS))


def _align(num_bytes: int) -> int:
    return -(-num_bytes // BOUNDARY_BYTES) * BOUNDARY_BYTES


def find_expert_slots(
    stage: Stage, layer: Layer, number: int, rule: Rule, units: Sequence[Unit], num_before: int
) -> ExpertSlots:
    """Return the slots of a layer of which rule ``number``, from 1 on, takes ``units``.

    The rule took ``num_before`` layers ahead of this one. Raises PlanError for a rule that takes
    anything but the routed experts of the layer, all of them, and for more slots than experts.
    """
    assert rule.cached_experts is not None
    num_experts = require_experts(stage, layer, number, rule, units)
    more = num_before < (rule.cached_experts_more or 0)
    num_slots = rule.cached_experts + more
    if num_slots > num_experts:
        asked = f"{rule.cached_experts} and one more" if more else str(rule.cached_experts)
        raise PlanError(
            f"rule {number} has cached_experts: {asked}, and layer {layer.index} of "
            f"{stage.model.source} has {num_experts} experts: keep {num_experts} at most, or leave "
            "them resident"
        )
    inner = find_inner(stage, units) if rule.split_expert else 0
    if rule.split_expert and not inner:
        raise PlanError(
            f"rule {number} has split_expert, and the experts of layer {layer.index} of "
            f"{stage.model.source} cannot be split: they are packed, have {CHUNK_COLUMNS} inner "
            f"columns or fewer, or no projection named {' or '.join(sorted(_DOWN))}: leave "
            "split_expert out"
        )
    return ExpertSlots(num_slots, num_experts, tuple(units), rule.share_of_cores, inner)


def find_inner(stage: Stage, units: Sequence[Unit]) -> int:
    """Find the inner columns of experts; 0 if a part of them cannot be multiplied alone.

    Packed weights lie in halves of a row, and their patches by place.
    """
    weights = [u for u in units if u.part is Part.WEIGHT and not u.name.endswith("bias")]
    if any(p.form.kind is Kind.PACKED for unit in weights for p in unit.parameters):
        return 0
    down = next((u for u in weights if _DOWN.intersection(u.name.split("."))), None)
    if down is None:
        return 0
    inner = down.shape[-2 if is_in_out(stage, down) else -1]
    return inner if inner > CHUNK_COLUMNS else 0


def is_in_out(stage: Stage, unit: Unit) -> bool:
    """Return True if a unit holds a matrix of all experts as [experts, in, out]."""
    of = unit.parameters[0]
    is_matrix = of.is_fused and len(of.shape) == 3
    return is_matrix and of.form.is_raw and stage.architecture.routing.in_out
