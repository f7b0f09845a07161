"""Weights that turn out not to pack, and are held as they are stored within the plan's budget."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from offplan.checkpoint.model import Model
from offplan.errors import InputError, UnpackableError
from offplan.expert_slots import require_few_pairs
from offplan.held.held import hold
from offplan.held.packing import leave_unpacked
from offplan.library.held_memory import count_held
from offplan.packing_sample import find_unpackable
from offplan.placement import place
from offplan.plan import Plan
from offplan.runtime.memory.gpu_memory import return_memory
from offplan.unpacked import Unpacked

_Loaded = TypeVar("_Loaded")
Settle = Callable[[Plan, Model, Sequence[str]], Plan | None]
"""Returns another plan for a model, in which the named weights are not packed; None if none can be.
"""


def leave_as_stored(plan: Plan, model: Model, names: Sequence[str]) -> Plan | None:
    """Return a plan with some more weights held as they are stored, its rules unchanged.

    Its memory is counted anew, its times are those of the plan. Returns None if one of the weights
    lies off the GPU, where it would cross the link, or if the plan would exceed its budget. Raises
    PlanError for rules that do not fit.
    """
    before = plan.offload
    if before.packing is None:
        return None
    packing = leave_unpacked(model, before.packing, names)
    after = before.model_copy(update={"packing": packing})
    placed = (place(hold(model, each.packing), each) for each in (before, after))
    # slabs hold what they held: whatever is left unpacked is resident
    if len({placement.slabs for placement in placed}) > 1:
        return None
    noted = plan.goal.model_copy(update={"leave_unpacked": note_unpacked(plan, names)})
    kept = count_held(plan.model_copy(update={"goal": noted, "offload": after}), model)
    return kept if kept.describe_excess() is None else None


def settle_packing(plan: Plan, model: Model, settle: Settle) -> Plan:
    """Sample the weights that a plan packs, and return a plan that packs none that will not pack.

    It is the plan itself where all will, or nothing is at hand to be sampled, or nothing can be
    settled before loading. Raises what ``settle`` and ``find_unpackable`` raise.
    """
    names = find_unpackable(model, plan.offload.packing)
    return (settle(plan, model, names) if names else None) or plan


def load_settled(
    plan: Plan,
    model: Model,
    device: torch.device,
    load: Callable[[Plan], _Loaded],
    settle: Settle,
) -> tuple[Plan, _Loaded]:
    """Load by a plan and, where weights turn out not to pack, by one that does not pack these.

    Returns the plan that was loaded by. Raises UnpackableError if ``settle`` finds no such plan,
    what ``settle`` raises, and PlanError for a batch whose steps kept experts do not serve.
    """
    require_few_pairs(model, plan.offload, plan.workload.batch)
    while True:
        try:
            return plan, load(plan)
        except UnpackableError as error:
            settled = settle(plan, model, error.names)
            if settled is None:
                raise
        return_memory(device)  # by now the error, whose frames hold what was loaded, is gone
        plan = settled


def note_unpacked(plan: Plan, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a plan's goal leaves as they are stored, with these names added."""
    left = plan.goal.leave_unpacked
    noted = Unpacked(left).with_names(names).names
    if set(noted) == set(left):
        raise InputError(f"{', '.join(names)} are left unpacked already: a fault of offplan")
    return noted
