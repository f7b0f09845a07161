"""A plan held against what there is by now: its model, its profile, its decision, this machine."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from offplan.checkpoint.model import Model
from offplan.drafts.acceptance import AcceptanceProfile, check_acceptance, load_acceptance
from offplan.engines.export import export_plan
from offplan.errors import (
    ExportError,
    InputError,
    MemoryLimitError,
    OffplanError,
    PlanError,
    ProfileError,
)
from offplan.files import StrPath
from offplan.hostmem.limits import check_host_room, lock_limit
from offplan.library.analysis import why_not_plan
from offplan.library.machines import check_cores, measure_here
from offplan.library.planned import (
    describe_drift,
    find_planned_model,
    open_planned_machine,
    read_planned_model,
)
from offplan.library.repricing import list_changes, price_decision, price_on
from offplan.machine.profile import MachineProfile
from offplan.plan import AcceptanceRef, Plan, RoutingRef, take_plan
from offplan.progress import Stages, silent
from offplan.routing.profile import RoutingProfile, check_routing, load_routing
from offplan.stores import STORES
from offplan.units import format_bytes, format_rate
from offplan.upkeep.figures import Finding, Verdict, list_contradictions
from offplan.upkeep.local_gpu import LocalGPU, find_local_gpu
from offplan.upkeep.weights import check_weights

Profile = TypeVar("Profile", RoutingProfile, AcceptanceProfile)
"""What a run recorded, and a plan was made from."""

MEASURED_TO = 0.05
"""Part of a link's rate by which a measurement may be off before that is drift.

Source: chosen, between the spread of samples and a link that has lost half of its lanes.
"""


def check_plan(
    plan: Plan | StrPath,
    *,
    model: StrPath | None = None,
    with_machine: bool = True,
    with_network: bool = True,
    measure: bool = False,
    weights: bool = False,
    record_weights: bool = False,
    on_stage: Stages = silent,
) -> tuple[Finding, ...]:
    """Check whether a plan still holds, and whether it could run now.

    ``plan`` is the plan or its file. Its figures are compared with each other, the model's headers
    and config with the plan's, and its profile with the fingerprint. Its prediction is compared
    with what its decision costs by this version of offplan. ``run``, or the engine that the plan is
    for, is asked whether it refuses the plan. ``with_machine`` also looks at the GPU here, if there
    is one, and at the free memory of GPU and host. Without ``with_network`` a model that is neither
    on this disk nor in the Hub's cache is not compared. ``measure`` measures the link. ``weights``
    reads all weights that are on this disk and compares their digests, and ``record_weights``
    writes these beside the plan's file, too. ``model`` is where the model is to be read instead of
    where the plan says. ``on_stage`` hears what begins.

    Raises CheckpointError and HubError if the model cannot be read. Raises InputError for a list of
    digests that is not valid or has others. Raises what measuring raises.
    """
    plan = take_plan(plan)
    read = read_planned_model if with_network else find_planned_model
    found = read(plan, model, on_stage("reading headers"))
    profile, finding = _check_profile(plan, found)
    figures = [_check_figures(plan), finding]
    if plan.routing is not None:
        told = "routing", "reuse", load_routing, check_routing
        figures.append(_check_recorded(plan, plan.routing, *told, found))
    if plan.acceptance is not None:
        of_drafts = "acceptance", "acceptance", load_acceptance, check_acceptance
        figures.append(_check_recorded(plan, plan.acceptance, *of_drafts, found))
    if found is None:
        absent = f"{plan.model.source} is neither on this disk nor in the Hub's cache: not compared"
        findings = [
            Finding("model", "unknown", f"{absent} (name a local copy as `model`)"),
            *figures,
            _check_budget(plan),
        ]
    else:
        timed = all(each.verdict == "holds" for each in figures)
        findings = [*_check_model(plan, found), *figures]
        findings.append(_check_prediction(plan, found, timed=timed))
        running = _check_running(plan, found)
        if running.text != findings[-1].text:
            findings.append(running)
        if weights:
            progress = on_stage("reading weights")
            findings.append(
                check_weights(found, plan.weights_file, progress, record=record_weights)
            )
    if not with_machine:
        return tuple(findings)
    here = find_local_gpu()
    if plan.has_cores and plan.goal.engine is None and (here or plan.machine.is_cpu):
        findings.append(_check_cores(plan))
    if here is None:
        findings.append(Finding("this machine", "unknown", "there is no GPU here to compare with"))
    else:
        findings += [*_check_here(plan, profile, here)]
        findings += [*_check_link(plan, on_stage)] if measure else []
    return tuple(findings)


def _check_model(plan: Plan, model: Model) -> Iterator[Finding]:
    drifts = [*describe_drift(plan, model)]
    yield from (Finding("model", "drift", text) for text in drifts)
    if not drifts:
        at = f" at {plan.model.revision[:12]}" if plan.model.revision else ""
        files = "headers"
        if plan.model.config_sha256:
            files += " and config.json"
        if plan.model.generation_config_sha256 and model.generation is not None:
            files = f"{files.replace(' and', ',')} and generation_config.json"
        text = f"{files} of {plan.model.source}{at} are unchanged since the plan"
        yield Finding("model", "holds", text)


def _check_profile(plan: Plan, model: Model | None) -> tuple[MachineProfile | None, Finding]:
    """Find the plan's profile, and say whether the plan was made from its figures."""
    name = plan.machine.profile
    try:
        machine = open_planned_machine(plan)
    except ProfileError as error:
        return None, Finding("profile", "unknown", f"it cannot be compared: {error}")
    if machine is None:
        text = f"figures were measured on {plan.machine.name} and kept in no profile"
        return None, Finding("profile", "unknown", text)
    planned = plan.machine
    figures = (
        ("name", planned.name, machine.name),
        ("link", planned.link, machine.link),
        ("basis", planned.basis, machine.basis),
        ("h2d", format_rate(planned.h2d), format_rate(machine.h2d.value)),
        ("uva", format_rate(planned.uva), format_rate(machine.uva.value)),
    )
    changes = [f"{figure} {old} -> {new}" for figure, old, new in figures if old != new]
    if machine.fingerprint == planned.fingerprint:
        if not changes:
            return machine, Finding("profile", "holds", f"the figures of {name} are unchanged")
        text = f"the plan was edited, {name} says otherwise ({'; '.join(changes)}): undo the edit"
        return machine, Finding("profile", "drift", text)
    with suppress(PlanError):  # which is told of the prediction
        if model is not None:
            changes += list_changes(plan, price_on(plan, model, machine))
    told = "; ".join(changes) or "none that this plan depends on"
    text = f"{name} has other figures by now ({told}): offplan replan makes the plan of those"
    return machine, Finding("profile", "drift", text)


def _check_recorded(
    plan: Plan,
    planned: RoutingRef | AcceptanceRef,
    name: str,
    what: str,
    load: Callable[[Path], Profile],
    check: Callable[[Profile, Model, str], None],
    model: Model | None,
) -> Finding:
    """Say whether the plan was made from a recorded profile as it is by now.

    Without a model, whether the file is one of the model is not compared.
    """
    try:
        profile = load(Path(plan.locate(planned.file)))
        if model is not None:
            check(profile, model, planned.file)
    except InputError as error:
        return Finding(name, "unknown", f"it cannot be compared: {error}")
    if profile.fingerprint == planned.fingerprint:
        return Finding(name, "holds", f"the {what} in {planned.file} is unchanged")
    was, now = planned.fingerprint[:12], profile.fingerprint[:12]
    again = "offplan replan makes the plan of it"
    text = f"the plan was made from {planned.file} as {was}, which is {now} by now: {again}"
    return Finding(name, "drift", text)


def _check_figures(plan: Plan) -> Finding:
    """Hold the plan's figures against each other, for which the plan alone is needed."""
    if contradictions := list_contradictions(plan):
        told = "; ".join(contradictions)
        return Finding("figures", "drift", f"edited: {told}: offplan replan makes the plan again")
    return Finding("figures", "holds", "the plan's figures agree with each other")


def _check_budget(plan: Plan) -> Finding:
    """Hold the plan's own figures against its budget, where no headers are there to price it by."""
    if (excess := plan.describe_excess()) is not None:
        return Finding("prediction", "infeasible", excess)
    return Finding("prediction", "unknown", "offplan prices a decision by its model's headers")


def _check_prediction(plan: Plan, model: Model, *, timed: bool) -> Finding:
    """Price a plan's decision again, for the model as it is by now.

    ``timed`` says whether the figures that the plan was made from are here, so that times can be.
    """
    why = "edited, or made by another version"
    if any(describe_drift(plan, model)):
        why = "for the model as it is by now"
    try:
        priced = price_decision(plan, model)
    except PlanError as error:
        return Finding("prediction", "drift", str(error))
    if (excess := priced.describe_excess()) is not None:
        text = excess if priced is plan else f"{why}: {excess}"
        return Finding("prediction", "infeasible", text)
    if priced is plan:
        text = "the decision costs what the plan says"
        if plan.goal.engine is not None:
            text += f", as {plan.goal.engine} runs it"
        if not timed:
            text = "memory is what the decision takes; times need the figures it was made from"
        return Finding("prediction", "holds", text)
    changes = "; ".join(list_changes(plan, priced))
    return Finding("prediction", "drift", f"{why}: {changes}: offplan replan makes it again")


def _check_running(plan: Plan, model: Model) -> Finding:
    """Ask what the plan is for, ``run`` or an engine, whether it refuses the plan."""
    if (engine := plan.goal.engine) is None:
        why = why_not_plan(model, plan, edited=True)
        if why is None:
            return Finding("run", "holds", "`run` can execute the decision")
        return Finding("run", "refused", why)
    try:
        export_plan(plan, model, engine)
    except (ExportError, PlanError) as error:
        return Finding("run", "refused", str(error))
    return Finding("run", "holds", f"flags of {engine} can say the decision")


def _check_cores(plan: Plan) -> Finding:
    """Say whether the host's cores of this machine can multiply what the plan gives them."""
    try:
        check_cores(plan.goal.host_threads)
    except OffplanError as error:
        return Finding("host cores", "refused", str(error))
    return Finding("host cores", "holds", "their kernels run on this processor")


def _check_here(plan: Plan, profile: MachineProfile | None, here: LocalGPU) -> Iterator[Finding]:
    """Check what can be asked of this machine at once."""
    same = here.name == plan.machine.name
    text = f"planned for {plan.machine.name}; here is {here.name}"
    again = ": offplan replan --machine names a profile of this one"
    yield _find("GPU", text, holds=same, remedy=again)
    needed, room = plan.prediction.gpu_memory.total_bytes, here.free_bytes
    have = f"{format_bytes(room)} of {format_bytes(here.total_bytes)} are free"
    remedy = ": close what else uses it"
    if needed > here.total_bytes:
        remedy = ": offplan plan --gpu-memory asks for a plan that takes less"
    text = f"{format_bytes(needed)} are needed; {have}"
    yield _find("GPU memory", text, holds=needed <= room, otherwise="infeasible", remedy=remedy)
    if (store := STORES[plan.offload.store]).num_gpus > 1:
        text = f"{here.num_gpus} GPUs are visible; the store is a {store.title}'s memory"
        holds = here.num_gpus >= store.num_gpus
        yield _find(store.title, text, holds=holds, otherwise="infeasible")
    if needed := plan.prediction.host_memory_bytes:
        yield from _check_host_memory(needed)
    node = None if profile is None or profile.numa_node is None else profile.numa_node.value
    if same and node is not None:
        text = f"the GPU is on node {here.numa_node}; the profile has it on {node}"
        yield _find("NUMA", text, holds=here.numa_node == node)


def _find(
    subject: str, text: str, *, holds: bool, otherwise: Verdict = "drift", remedy: str = ""
) -> Finding:
    """Return a finding: ``otherwise`` and ``remedy`` are for what does not hold."""
    return Finding(subject, "holds" if holds else otherwise, text if holds else text + remedy)


def _check_host_memory(needed: int) -> Iterator[Finding]:
    """Check the memory that weights take on the host: what is free, and what can be pinned."""
    try:
        check_host_room(needed)
    except MemoryLimitError as error:
        yield Finding("host memory", "infeasible", f"{error}{error.more}")
    else:
        text = f"{format_bytes(needed)} of weights have room within machine and control groups"
        yield Finding("host memory", "holds", text)
    limit = lock_limit()
    if limit is not None and limit < needed:
        text = (
            f"ulimit -l is {format_bytes(limit)}, less than {format_bytes(needed)}; NVIDIA's "
            "driver for Linux does not count what it locks"
        )
        yield Finding("page locks", "unknown", text)


def _check_link(plan: Plan, on_stage: Stages) -> Iterator[Finding]:
    """Measure the link, and hold its rates against the plan's."""
    others = STORES[plan.offload.store].num_gpus > 1 or plan.goal.num_copying > 1
    here = measure_here(with_others=others, on_stage=on_stage).profile
    machine = here.with_link(plan.offload.store, plan.goal)
    rates = (("h2d", plan.machine.h2d, machine.h2d), ("uva", plan.machine.uva, machine.uva))
    for name, planned, measured in rates:
        ratio = measured.value / planned
        text = (
            f"{format_rate(planned)} in the plan, {format_rate(measured.value)} here, measured "
            f"({ratio:.3f} of it)"
        )
        again = ": offplan measure -o writes a profile, offplan replan --machine plans with it"
        yield _find(f"link, {name}", text, holds=abs(ratio - 1) <= MEASURED_TO, remedy=again)
