"""Questions to the planner: asked by a caller, or asked again as a plan file records them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offplan.capabilities.drafts import Draft
from offplan.capabilities.goal import Asked
from offplan.checkpoint.model import Model
from offplan.drafts.acceptance import (
    AcceptanceProfile,
    check_acceptance,
    check_kind,
    load_acceptance,
)
from offplan.engines.runner import find_runner, lower
from offplan.errors import ExportError, InputError
from offplan.files import StrPath
from offplan.library.machines import Machine, find_obstacle
from offplan.library.planned import open_planned_model, open_planned_profile, read_planned_model
from offplan.library.runnable import suit
from offplan.machine.name import parse_name
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Goal, Plan, Workload, take_plan
from offplan.planner.question import Question
from offplan.progress import Progress
from offplan.routing.profile import RoutingProfile, check_routing, load_routing
from offplan.stores import StoreName


def ask(
    model: Model,
    machine: Machine,
    workload: Workload | None = None,
    *,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    store: StoreName = "host",
    routing: str | None = None,
    acceptance: str | None = None,
    **goal: Any,
) -> Question:
    """Ask which plan is the best one; ``make_plan`` and ``find_frontier`` answer.

    ``workload`` is what the plan is optimised for, the default one if left out. ``gpu_memory`` and
    ``host_memory`` are bytes. ``gpu_memory`` is all that the process may take on the card, context
    included; left out, it is what is free. ``host_memory`` is what weights may take of the store;
    left out, it is what the store has. No more than the machine has is planned with. ``store`` is
    ``host``, or ``peer`` for the memory of a second GPU. ``routing`` is the file of a routing
    profile, which says how soon experts are chosen again, ``acceptance`` that of a profile which
    says how often drafts are taken. ``goal`` are the fields of ``Goal``: its
    objective, its targets (``max_ttft_s``), its ``engine``, and what each capability has there.
    Those left out or None are as ``Goal`` has them, or what suits the model best.

    Raises InputError for a routing profile that cannot be read or is of another model or batch, and
    for experts that cannot be cached. Raises InputError for a limit below zero, a name that no
    weight has, and an engine beside the store ``peer``. Raises ProfileError if the link to a second
    GPU is not known.
    """
    workload = workload or Workload()
    free = machine.free_gpu_bytes if gpu_memory is None else gpu_memory
    budget = Budget.from_arguments(gpu_memory=free, host_memory=host_memory)
    wanted = suit(Goal.from_arguments(**goal), model, workload.context)
    about = Asked(model, workload.batch, store, machine.no_cores)
    wanted = wanted.model_copy(update=wanted.choose(about, by_others=not wanted.is_own))
    asked = workload, budget, wanted, store, machine.profile_name
    posed = pose(model, machine.profile, *asked, routing_file=routing, acceptance_file=acceptance)
    return replace(posed, no_cores=machine.no_cores)


def ask_again(
    plan: Plan | StrPath,
    *,
    model: Model | StrPath | None = None,
    machine: Machine | None = None,
    accept_drift: bool = False,
    routing: str | None = None,
    acceptance: str | None = None,
    on_progress: Progress | None = None,
    **goal: Any,
) -> Question:
    """Ask the question that a plan answers, as its file records it.

    ``plan`` is the plan or its file, which may have keys of before. From the same profile,
    ``make_plan`` makes the same plan of it, byte for byte. ``model`` is the plan's model, opened
    already or where it is to be read instead of where the plan says. ``machine`` replaces the one
    that the plan names. If its cores cannot multiply, the question leaves them out, unless
    ``host_cores`` asks for them. With ``accept_drift`` the question is about the model as it is by
    now, though it is not the plan's. ``goal`` are fields of ``Goal`` that take the place of the
    plan's, but those that are None. ``routing`` takes the place of its routing profile's file, and
    ``acceptance`` of its acceptance profile's.
    ``on_progress`` hears (shards read, shards in all).

    Raises CheckpointError, HubError and DriftError as ``open_planned_model`` does. Raises
    ProfileError if the plan's profile is gone or not valid. Raises InputError if its routing
    profile cannot be read. Raises InputError for a plan whose machine was measured and kept in no
    profile, unless ``machine`` is given.
    """
    plan = take_plan(plan, to_replan=True)
    wanted = renew_goal(plan.goal, **goal)
    if machine is not None:
        profile, name, no_cores = machine.profile, machine.profile_name, machine.no_cores
        if no_cores is not None and goal.get("host_cores") is None:
            wanted = wanted.without_cores()
    else:
        kept, name = open_planned_profile(plan), plan.machine.profile
        if kept is None or name is None:
            raise InputError(
                f"the plan was made from figures measured on {plan.machine.name}, which no profile "
                "keeps (machine.profile is null): measure that machine again, or name a profile of "
                "it as `machine`"
            )
        profile, no_cores = kept, find_obstacle(kept, parse_name(name))
    if not isinstance(model, Model):
        model = read_planned_model(plan, model, on_progress)
    found = model if accept_drift else open_planned_model(plan, model)
    # a local copy goes by the name that the plan has for it
    named = replace(found, source=plan.model.source, revision=plan.model.revision)
    asked = plan.workload, plan.budget, wanted, plan.offload.store
    file = routing
    if file is None and plan.routing is not None:
        file = plan.locate(plan.routing.file)
    taken = acceptance
    if taken is None and plan.acceptance is not None:
        taken = plan.locate(plan.acceptance.file)
    posed = pose(named, profile, *asked, name, routing_file=file, acceptance_file=taken)
    question = replace(posed, no_cores=no_cores)
    if routing is None and plan.routing is not None:
        question = replace(question, routing_file=plan.routing.file)
    if acceptance is None and plan.acceptance is not None:
        question = replace(question, acceptance_file=plan.acceptance.file)
    return question


def renew_goal(goal: Goal, **changes: Any) -> Goal:
    """Return a plan's goal with other values, but those that are None; nothing is left to choose.

    Without the host's cores their threads go, too. Raises InputError as ``Goal`` does.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    kept = goal.without_cores() if changes.get("host_cores") is False else goal
    return Goal.from_arguments(**{**dict(kept), **changes})


def pose(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    goal: Goal | None = None,
    store: StoreName = "host",
    profile: str | None = None,
    *,
    routing_file: str | None = None,
    acceptance_file: str | None = None,
) -> Question:
    """Pose a question about a model that is lowered to what the goal's GPUs hold.

    The budget is cut to what the machine has. Raises InputError for a goal that names an engine
    offplan does not export to, or GPUs that it cannot divide the model among. Raises InputError
    for a context that the engine does not serve, and for a routing or acceptance profile that is
    not of the model. Raises what Question raises.
    """
    goal = suit(goal or Goal(), model, workload.context)
    try:
        runner = find_runner(goal.engine, goal.way)
        runner.require_served(model, workload.context)
        stages = lower(model, goal)
    except ExportError as error:
        raise InputError(f"`engine={goal.engine}`: {error}") from None
    if routing_file is not None:
        routing = read_routing(routing_file, model, goal.engine)
        stages = tuple(replace(each, routing=routing) for each in stages)
    if acceptance_file is not None:
        acceptance = read_acceptance(acceptance_file, goal.asked_draft)
        check_acceptance(acceptance, model, acceptance_file)
        stages = tuple(replace(each, acceptance=acceptance) for each in stages)
    asked = Question(
        *(stages, runner, machine, workload, budget, goal, store, profile, routing_file),
        acceptance_file=acceptance_file,
    )
    planned, host = asked.planned_machine, budget.host_memory
    if planned.host_memory is not None:
        most = planned.host_memory.value
        host = most if host is None else min(host, most)
    gpu = min(budget.gpu_memory, planned.gpu_memory.value)
    return replace(asked, budget=Budget(gpu_memory=gpu, host_memory=host))


def read_acceptance(file: str, draft: Draft | None = None) -> AcceptanceProfile:
    """Read an acceptance profile; raises InputError for another kind than the asked draft's."""
    profile = load_acceptance(Path(file))
    if draft is not None:
        check_kind(profile, draft, file)
    return profile


def read_routing(file: str, model: Model, engine: str | None = None) -> RoutingProfile:
    """Read a routing profile of a model; raises InputError for another model's, or an engine."""
    if engine is not None:
        raise InputError(
            f"`routing` with `engine={engine}`: no engine keeps experts by how soon they are "
            "chosen again; leave one of them out"
        )
    profile = load_routing(Path(file))
    check_routing(profile, model, file)
    return profile
