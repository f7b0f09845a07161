"""A plan held against its own decision, so that an edited one promises what it does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offplan.checkpoint.model import Model
from offplan.costs.capabilities import COUNTS
from offplan.costs.predict import predict
from offplan.engines.runner import lower
from offplan.errors import PlanError, ProfileError
from offplan.held.stage import Stage
from offplan.library.planned import (
    find_planned_acceptance,
    find_planned_routing,
    open_planned_machine,
)
from offplan.machine.profile import MachineProfile, load_profile
from offplan.placement import place
from offplan.plan import Plan, Prediction, Workload
from offplan.stores import STORES

STAND_IN = "h200-pcie5"
"""A shipped profile, for figures that are the same on every machine."""
_MACHINE_FREE = (
    *(f"gpu_memory.{term}" for term in ("resident", "ring", "kv_cache", "activations")),
    *(each.memory for each in STORES.values()),
)
"""Terms that follow from model, workload and decision alone."""
_HEADLINES = (
    "gpu_memory.total",
    *(each.memory for each in STORES.values()),
    *("prefill.step", "prefill.link_bytes", "decode.step", "decode.link_bytes"),
)
"""Terms that say the most about an edit."""


def price_again(plan: Plan, model: Model) -> Plan:
    """Return a plan with the prediction that its decision, workload and budget have by now.

    A plan that nobody has edited comes back as it is. ``model`` is the plan's.

    Raises PlanError for rules that do not fit the model, and for a plan that exceeds its own
    budget. If the profile it was made from is gone, raises PlanError if its memory or bytes over
    the link are not those that it predicts.
    """
    priced = price_decision(plan, model)
    if priced is not plan and (excess := priced.describe_excess()) is not None:
        raise PlanError(f"the plan was edited, or made by another version: {excess}")
    return priced


def price_as_run(plan: Plan, model: Model, goal: Mapping[str, Any] | None = None) -> Plan:
    """Return a plan as offplan's own runtime runs it, which is what can be measured here.

    A plan made for an engine loses that engine. ``goal`` are fields of ``Goal`` that take the place
    of the plan's, where they are true. The plan gets the prediction that the decision then has. A
    plan for an engine comes back as it is if the profile that it was made from is gone. With fields
    in ``goal``, it then loses the engine and keeps the prediction.
    """
    changes = {key: value for key, value in (goal or {}).items() if value}
    own = plan.goal.model_copy(update={"engine": None, **changes})
    if own == plan.goal:
        return plan
    machine = find_planned_machine(plan)
    moved = plan.model_copy(update={"goal": own})
    if machine is None:
        return moved if changes else plan
    return price_on(moved, model, machine)


def predict_workload(plan: Plan, model: Model, workload: Workload) -> Prediction | None:
    """Predict what a plan's decision takes for another workload than the plan's.

    Returns None if the profile that the plan was made from is gone.
    """
    machine = find_planned_machine(plan)
    if machine is None:
        return None
    changed = plan.model_copy(update={"workload": workload})
    return price_on(changed, model, machine).prediction


@dataclass(frozen=True)
class ComparedCounts:
    """The counts of a capability's executor in a decode step, predicted and counted."""

    predicted: Any
    """Prediction by the plan's routing profile, or by uniform routing if that is not there. What
    follows from a machine's rates is None if the plan's profile is gone, or was kept in no file."""
    counted: Any
    """The mean of the steps that ran."""


def compare_counts(
    plan: Plan, model: Model, counted: Mapping[str, Any]
) -> dict[str, ComparedCounts]:
    """Put what a plan predicts of its executors' counts beside what was counted, by their names."""
    names = [name for name in COUNTS if name in counted]
    if not names:
        return {}
    stage, *_ = hold_planned(plan, model)
    machine = _find_same_machine(plan)
    sizes = stage.mix(plan.offload.draft, plan.workload).shares
    asked = place(stage, plan.offload), stage, plan.workload.batch, machine, sizes
    return {name: ComparedCounts(COUNTS[name].predict(*asked), counted[name]) for name in names}


def price_decision(plan: Plan, model: Model) -> Plan:
    """Do what ``price_again`` does, whether or not the budget is kept."""
    machine = find_planned_machine(plan)
    priced = price_on(plan, model, machine or load_profile(STAND_IN))
    if machine is None:
        _refuse_changes(plan, priced.prediction)
        return plan
    return plan if _terms(priced.prediction) == _terms(plan.prediction) else priced


def price_on(plan: Plan, model: Model, machine: MachineProfile) -> Plan:
    """Return a plan with the prediction that its decision has on a machine, in budget or not.

    ``machine`` has the link to the plan's store. Raises PlanError for rules that do not fit.
    """
    prediction = predict(
        hold_planned(plan, model), machine, plan.workload, plan.budget, plan.offload
    )
    return plan.model_copy(update={"prediction": prediction})


def hold_planned(plan: Plan, model: Model) -> tuple[Stage, ...]:
    """Lower a plan's model to what the GPUs hold that the plan is for, packed as it says.

    It has the plan's profiles of routing and acceptance, if they are there still.

    Raises ExportError for GPUs that its engine cannot divide the model among, and PlanError for
    packing that does not fit it.
    """
    stages = lower(model, plan.goal, plan.offload.recoding)
    routing, acceptance = find_planned_routing(plan), find_planned_acceptance(plan)
    return tuple(replace(each, routing=routing, acceptance=acceptance) for each in stages)


def list_changes(before: Plan, after: Plan) -> list[str]:
    """Say what has changed from one prediction to another: the headlines, else every term."""
    changes = _changes(before.prediction, after.prediction)
    return [changes[term] for term in _HEADLINES if term in changes] or [*changes.values()]


def find_planned_machine(plan: Plan) -> MachineProfile | None:
    """Return the profile that a plan was made from; None if it is gone, or another by now.

    None as well where that holds of the plan's routing profile, or of its acceptance profile.
    """
    if plan.routing is not None and find_planned_routing(plan) is None:
        return None
    if plan.acceptance is not None and find_planned_acceptance(plan) is None:
        return None
    return _find_same_machine(plan)


def _find_same_machine(plan: Plan) -> MachineProfile | None:
    try:
        machine = open_planned_machine(plan)
    except ProfileError:
        return None
    same = machine is not None and machine.fingerprint == plan.machine.fingerprint
    return machine if same else None


def _refuse_changes(plan: Plan, prediction: Prediction) -> None:
    """Raise PlanError if a plan's own prediction is not what its decision gives anywhere."""
    terms = [*_MACHINE_FREE]
    for phase in ("prefill", "decode"):
        # how often a kernel reads what it reads in place is the machine's affair
        if phase == "decode" and plan.offload.draft is not None:
            continue  # how much text a pass gives is the acceptance profile's
        if all(getattr(rule, phase).streams for rule in plan.offload.rules):
            terms.append(f"{phase}.link_bytes")
    changes = _changes(plan.prediction, prediction)
    told = [changes[term] for term in terms if term in changes]
    if told:
        raise PlanError(
            "the plan was edited, or made by another version: its prediction is not what its "
            f"rules and workload give ({'; '.join(told)}), and the profile it was made from is not "
            "here to price it again: make it again with offplan plan, or undo the edit"
        )


def _changes(before: Prediction, after: Prediction) -> dict[str, str]:
    """Describe each term that two predictions print differently, by its path in the file."""
    old, new = _terms(before), _terms(after)
    return {
        term: f"{term} {old.get(term, 'none')} -> {new.get(term, 'none')}"
        for term in {**old, **new}
        if old.get(term) != new.get(term)
    }


def _terms(prediction: Prediction) -> dict[str, str]:
    """Return the terms as a plan prints them, by their path: ``decode.link_bytes``.

    Printed ones compare: what was read back from a file is rounded as it prints.
    """
    terms: dict[str, str] = {}
    for key, value in prediction.dump_with_units().items():
        section = value if isinstance(value, dict) else {"": value}
        terms |= {f"{key}.{name}".rstrip("."): figure for name, figure in section.items()}
    return terms
