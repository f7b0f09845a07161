"""Memory of a budget that a plan leaves free though it offloads."""

from collections import Counter
from dataclasses import dataclass

from offplan.placement import place
from offplan.plan import Plan
from offplan.planner.question import Question

WORTH_TELLING = 0.03
"""Share of the budget that has to stay unused. Source: chosen."""


@dataclass(frozen=True)
class Unused:
    """GPU memory of the budget that a plan leaves free, and what of the store has no room there."""

    unused_bytes: int
    smallest_part: str
    """The smallest parameter of one layer that lies in the store, by its name in the layer."""
    smallest_bytes: int
    slot_bytes: int
    """Bytes of one more slot of the ring: all that a layer streams; 0 where nothing streams."""


def find_unused(question: Question, plan: Plan) -> Unused | None:
    """Find what a question's plan leaves of its GPU memory; None for up to 3 % of the budget."""
    budget = plan.budget.gpu_memory
    unused_bytes = budget - plan.prediction.gpu_memory.total_bytes
    if not plan.offload.rules or unused_bytes <= WORTH_TELLING * budget:
        return None
    sizes: Counter[tuple[int, str]] = Counter()
    slot_bytes = 0
    for stage in question.held.pack(plan.offload.packing).stages:
        placement = place(stage, plan.offload)
        slot_bytes = max(slot_bytes, placement.slot_bytes)
        for entry in placement.entries:  # codes and scales of a parameter are placed as one
            sizes[entry.unit.layer, entry.unit.name] += entry.unit.nbytes
    (_, name), smallest_bytes = min(sizes.items(), key=lambda item: (item[1], item[0]))
    return Unused(unused_bytes, name, smallest_bytes, slot_bytes)
