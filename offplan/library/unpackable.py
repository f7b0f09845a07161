"""Weights that turn out not to pack: held as stored within the plan, or planned again around."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from offplan.checkpoint.model import Model
from offplan.errors import InputError, OffplanError, UnpackableError
from offplan.held.held import hold
from offplan.held.packing import leave_unpacked
from offplan.library.asking import ask_again
from offplan.library.repricing import STAND_IN, find_planned_machine, price_on
from offplan.machine.profile import load_profile
from offplan.packing_sample import find_unpackable
from offplan.placement import place
from offplan.plan import Plan
from offplan.planner.make import make_plan
from offplan.runtime.memory.gpu_memory import return_memory
from offplan.units import format_bytes
from offplan.unpacked import Unpacked

_Loaded = TypeVar("_Loaded")
Tell = Callable[[str], object]
"""Is told in a line what changes in a plan."""


def leave_as_stored(plan: Plan, model: Model, names: Sequence[str]) -> Plan | None:
    """Return a plan with some more weights held as they are stored, its rules unchanged.

    None where one of them lies off the GPU, where it would cross the link, or where the plan would
    exceed its budget: that plan has to be made again. Raises PlanError for rules that do not fit.
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
    changed = _note(plan, names).model_copy(update={"offload": after})
    machine = find_planned_machine(plan)
    if machine is not None:
        changed = price_on(changed, model, machine)
    else:  # memory follows from the decision on any machine, times are left as they are
        stand_in = load_profile(STAND_IN)
        old, new = (
            price_on(each, model, stand_in).prediction.gpu_memory for each in (plan, changed)
        )
        taken = plan.prediction.gpu_memory
        more = {
            term: getattr(taken, term) + getattr(new, term) - getattr(old, term)
            for term in type(taken).model_fields
        }
        memory = taken.model_copy(update=more)
        predicted = plan.prediction.model_copy(update={"gpu_memory": memory})
        changed = changed.model_copy(update={"prediction": predicted})
    fits = changed.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
    return changed if fits else None


def plan_around(plan: Plan, model: Model, names: Sequence[str]) -> Plan:
    """Make a plan again that leaves some more weights as they are stored.

    Raises what ``ask_again`` and ``make_plan`` raise, and says then what was to be done.
    """
    noted = _note(plan, names).goal.leave_unpacked
    try:
        return make_plan(ask_again(plan, model=model, leave_unpacked=noted)).plan
    except OffplanError as error:
        raise type(error)(
            f"{', '.join(names)} cannot be held packed, and the plan cannot be made again without: "
            f"{error}; offplan replan takes --leave-unpacked {','.join(noted)}"
        ) from None


def settle_packing(plan: Plan, model: Model, tell: Tell) -> Plan:
    """Sample the weights that a plan packs, and return a plan that packs none that will not pack.

    It is the plan itself where all will, or nothing is at hand to be sampled. Raises what
    ``plan_around`` and ``find_unpackable`` raise.
    """
    names = find_unpackable(model, plan.offload.packing)
    return _settle(plan, model, names, tell) if names else plan


def load_settled(
    plan: Plan,
    model: Model,
    device: torch.device,
    load: Callable[[Plan], _Loaded],
    tell: Tell | None,
) -> tuple[Plan, _Loaded]:
    """Load by a plan and, where weights turn out not to pack, by one that leaves them as stored.

    Returns the plan that was loaded by. Without ``tell`` no plan is made again: UnpackableError is
    raised where the plan's rules and budget do not take these weights as they are stored.
    """
    while True:
        try:
            return plan, load(plan)
        except UnpackableError as error:
            names = error.names
            if tell is None and leave_as_stored(plan, model, names) is None:
                raise
        return_memory(device)  # by now the error, whose frames hold what was loaded, is gone
        plan = _settle(plan, model, names, tell or (lambda _: None))


def _settle(plan: Plan, model: Model, names: Sequence[str], tell: Tell) -> Plan:
    told = f"{', '.join(names)} cannot be held packed (more patches than room)"
    kept = leave_as_stored(plan, model, names)
    if kept is not None:
        sizes = [each.prediction.gpu_memory.total_bytes for each in (plan, kept)]
        tell(
            f"{told}: held as stored, for which the plan has room; its GPU memory is "
            f"{format_bytes(sizes[1])} instead of {format_bytes(sizes[0])}"
        )
        return kept
    made = plan_around(plan, model, names)
    tell(f"{told}: planned again without packing these")
    return made


def _note(plan: Plan, names: Sequence[str]) -> Plan:
    """Return a plan whose goal records that these weights, too, are left as they are stored."""
    noted = Unpacked(plan.goal.leave_unpacked).with_names(names).names
    if set(noted) == set(plan.goal.leave_unpacked):
        raise InputError(f"{', '.join(names)} are left unpacked already: a fault of offplan")
    return plan.model_copy(update={"goal": plan.goal.model_copy(update={"leave_unpacked": noted})})
