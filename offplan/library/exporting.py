"""Plans exported to other engines, as they are or made again so that they can be."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.engines.export import Export, export_plan
from offplan.engines.registry import ENGINES, find_engine
from offplan.errors import ExportError, InfeasibleError, InputError, OffplanError, ProfileError
from offplan.library.asking import ask_again, pose
from offplan.library.planned import open_planned_profile
from offplan.library.repricing import price_on
from offplan.machine.profile import MachineProfile
from offplan.plan import Goal, Plan
from offplan.planner.make import make_plan
from offplan.records import explain
from offplan.units import format_seconds


def export_here(plan: Plan, model: Model, engine: str, file: Path) -> Export:
    """Say a plan to an engine, with the GPU's memory and the NUMA nodes that its profile has.

    ``file`` is the plan's own. Raises what ``export_plan`` does. An ExportError also says what
    making the plan again for the engine costs, and whether a worker in it would run this one.
    """
    machine = _find_machine(plan)
    gpu_bytes = None if machine is None else machine.gpu_memory.value
    nodes = None if machine is None or machine.numa_nodes is None else machine.numa_nodes.value
    try:
        export = export_plan(plan, model, engine, file=file, gpu_bytes=gpu_bytes, numa_nodes=nodes)
    except ExportError as error:
        ways = [_what_replanning_costs(plan, model, engine), *_name_worker(plan, model, engine)]
        raise ExportError(". ".join([str(error), *ways])) from None
    if machine is None:
        return export
    goal = plan.goal.model_copy(update={"engine": engine})
    there = {"goal": goal, "offload": export.engine.round_up(plan.offload)}
    linked = machine.with_link("host", goal)
    predicted = price_on(plan.model_copy(update=there), model, linked).prediction
    note = (
        f"predicted there: {format_seconds(predicted.prefill.step_s)} to the first token, "
        f"{format_seconds(predicted.decode.step_s)} a token"
    )
    return replace(export, notes=(*export.notes, note))


def plan_for(plan: Plan, model: Model, engine: str, **changes: int) -> Plan:
    """Make the fastest plan of a plan's own workload and budget that an engine can run.

    ``changes`` are keys of the goal; the others are the plan's own. Raises what ``ask_again`` and
    ``make_plan`` do.
    """
    question = ask_again(plan, model=model)
    try:
        # a plan for throughput has chosen its batch
        there = plan.goal.for_engine(engine, objective="latency", **changes)
        goal = Goal.model_validate(there)
    except ValidationError as error:
        raise InputError("; ".join(why for _, why in explain(error))) from None
    asked = pose(
        question.model, question.machine, plan.workload, plan.budget, goal, "host", question.profile
    )
    made = make_plan(asked).plan
    return plan.model_copy(update=dict(made))  # whose paths start where the plan's do


def describe_cost(plan: Plan, made: Plan) -> str:
    """Say what a request takes on the engine that a plan was made for, beside the plan itself."""
    share = made.prediction.objective_s / plan.prediction.objective_s - 1
    beside = "" if plan.goal.engine is None else f" than what {plan.goal.engine} takes for the plan"
    percent = f"{100 * abs(share):.1f} %"
    if percent == "0.0 %":
        return f"no longer a request{beside}"
    return f"{percent} {'longer' if share > 0 else 'shorter'} a request{beside}"


def _what_replanning_costs(plan: Plan, model: Model, engine: str) -> str:
    chosen, _ = find_engine(engine)
    # a worker reads the plan from its file
    way = f"offplan plan --for {engine} makes" if chosen.is_worker else "--replan exports"
    told = f"{way} the fastest plan that {chosen.title} can run"
    try:
        made = plan_for(plan, model, engine)
    except InfeasibleError as error:
        return f"Nor would planning again for {engine} help: {error}"
    except OffplanError as error:
        return f"{told}, but not here: {error}"
    return f"{told}, predicted {describe_cost(plan, made)}"


def _name_worker(plan: Plan, model: Model, engine: str) -> Iterator[str]:
    """Say that a worker in the engine runs what its flags cannot say, where one does."""
    chosen, _ = find_engine(engine)
    worker = f"{chosen.family}-worker"
    if chosen.is_worker or worker not in ENGINES:
        return
    with suppress(ExportError):
        export_plan(plan, model, worker)
        yield f"{ENGINES[worker].title} runs it as it is: --engine {worker}"


def _find_machine(plan: Plan) -> MachineProfile | None:
    """Read the profile that a plan was made from; None if there is none."""
    try:
        return open_planned_profile(plan)
    except ProfileError:
        return None
