"""Plans exported to other engines, as they are or made again so that they can be."""

from dataclasses import replace

from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.costs.engine_times import EngineTimes, price_on_engine
from offplan.engines.export import Export, export_plan, find_engine
from offplan.engines.ranks import hold_model
from offplan.errors import ExportError, InfeasibleError, InputError, OffplanError, ProfileError
from offplan.library.asking import ask_again
from offplan.library.planned import open_planned_profile
from offplan.machine.profile import MachineProfile
from offplan.plan import Goal, Plan
from offplan.planner.make import make_plan
from offplan.ranks import Ranks
from offplan.records import explain
from offplan.units import format_seconds


def export_here(plan: Plan, model: Model, engine: str) -> Export:
    """Say a plan to an engine, with the memory of the GPU that its profile has.

    Raises what ``export_plan`` does; an ExportError also says what making the plan again for the
    engine costs.
    """
    machine = _find_machine(plan)
    gpu_bytes = None if machine is None else machine.gpu_memory.value
    try:
        export = export_plan(plan, model, engine, gpu_bytes=gpu_bytes)
    except ExportError as error:
        raise ExportError(f"{error}. {_what_replanning_costs(plan, model, engine)}") from None
    times = _price(plan, model, engine)
    if times is None:
        return export
    note = (
        f"predicted there: {format_seconds(times.prefill_s)} to the first token, "
        f"{format_seconds(times.decode_s)} a token"
    )
    return replace(export, notes=(*export.notes, note))


def plan_for(plan: Plan, model: Model, engine: str, ranks: Ranks | None = None) -> Plan:
    """Make the fastest plan of a plan's own workload and budget that an engine can run.

    ``ranks`` are the GPUs that it is for, the plan's own if left out. Raises what ``ask_again`` and
    ``make_plan`` do.
    """
    ranks = plan.goal.ranks if ranks is None else ranks
    question = ask_again(plan, model=model)
    # a plan for throughput has chosen its batch
    changes = {
        "engine": engine,
        "objective": "latency",
        "tensor_parallel": ranks.tensor,
        "pipeline_parallel": ranks.pipeline,
        "expert_parallel": ranks.expert,
    }
    try:
        goal = Goal.model_validate({**dict(plan.goal), **changes})
    except ValidationError as error:
        raise InputError("; ".join(why for _, why in explain(error))) from None
    made = make_plan(replace(question, goal=goal, store="host")).plan
    return plan.model_copy(update=dict(made))  # whose paths start where the plan's do


def describe_cost(plan: Plan, made: Plan, model: Model) -> str:
    """Say what a request takes on the engine that a plan was made for, beside the plan itself.

    The plan is one of offplan's own runtime, ``model`` is theirs.
    """
    assert made.goal.engine is not None, "it was made for an engine"
    times = _price(made, model, made.goal.engine)
    taken = made.prediction.objective_s if times is None else times.request_s(made.workload)
    share = taken / plan.prediction.objective_s - 1
    return f"{100 * abs(share):.1f} % {'longer' if share >= 0 else 'shorter'} a request"


def _what_replanning_costs(plan: Plan, model: Model, engine: str) -> str:
    title = find_engine(engine)[0].title
    try:
        made = plan_for(plan, model, engine)
    except InfeasibleError as error:
        return f"Nor would --replan help: {error}"
    except OffplanError as error:
        return f"--replan exports the fastest plan that {title} can run, but not here: {error}"
    cost = describe_cost(plan, made, model)
    return f"--replan exports the fastest plan that {title} can run, predicted {cost}"


def _price(plan: Plan, model: Model, engine: str) -> EngineTimes | None:
    """Price a plan on an engine; None where the profile it was made from is not there."""
    machine = _find_machine(plan)
    if machine is None:
        return None
    goal = plan.goal.model_copy(update={"engine": engine})
    held = hold_model(model, goal, plan.workload)
    times = [
        price_on_engine(
            stage,
            machine.with_ranks(goal.ranks.num_gpus),
            plan.workload,
            plan.offload,
            copies_in_turns=find_engine(engine)[0].copies_in_turns,
        )
        for stage in held.stages
    ]
    return EngineTimes(sum(t.prefill_s for t in times), sum(t.decode_s for t in times))


def _find_machine(plan: Plan) -> MachineProfile | None:
    """Read the profile that a plan was made from; None where there is none."""
    try:
        return open_planned_profile(plan)
    except ProfileError:
        return None
