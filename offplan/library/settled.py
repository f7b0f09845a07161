"""Weights that turn out not to fit a form are held as stored, within the plan's budget."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from offplan.capabilities.table import Recoding
from offplan.checkpoint.model import Model
from offplan.held.held import exclude_weights, hold
from offplan.library.held_memory import count_held
from offplan.packing_sample import take_sample
from offplan.placement import place
from offplan.plan import Plan
from offplan.refusals import require_batch
from offplan.runtime.memory.gpu_memory import return_memory

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
    if before.recoding is None:
        return None
    after = before.recoded_by(exclude_weights(model, before.recoding, names))
    placed = (place(hold(model, each.recoding), each) for each in (before, after))
    # slabs hold what they held: whatever is left unpacked is resident
    if len({placement.slabs for placement in placed}) > 1:
        return None
    changed = {"goal": plan.goal.exclude(names), "offload": after}
    kept = count_held(plan.model_copy(update=changed), model)
    return kept if kept.describe_excess() is None else None


def settle_sampled(plan: Plan, model: Model, settle: Settle) -> Plan:
    """Sample the weights that a plan packs, and return a plan that packs none that will not pack.

    It is the plan itself where all will, or nothing is at hand to be sampled, or nothing can be
    settled before loading. Raises what ``settle`` and ``take_sample`` raise.
    """
    (names,) = take_sample(model, plan.offload.recoding)
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
    require_batch(model, plan.offload, plan.workload.batch)
    while True:
        try:
            return plan, load(plan)
        except Recoding.misfit as error:
            settled = settle(plan, model, error.names)
            if settled is None:
                raise
        return_memory(device)  # by now the error, whose frames hold what was loaded, is gone
        plan = settled
