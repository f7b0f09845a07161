"""Plans exported to other engines, as they are or made again so that they can be."""

from dataclasses import replace

from offplan.checkpoint.model import Model
from offplan.engines.export import Export, export_plan, find_engine
from offplan.errors import ExportError, InfeasibleError, OffplanError, ProfileError
from offplan.library.asking import ask_again
from offplan.library.planned import open_planned_profile
from offplan.plan import Plan
from offplan.planner.make import make_plan


def export_here(plan: Plan, model: Model, engine: str) -> Export:
    """Say a plan to an engine, with the memory of the GPU that its profile has.

    Raises what ``export_plan`` does; an ExportError also says what making the plan again for the
    engine costs.
    """
    try:
        return export_plan(plan, model, engine, gpu_bytes=_gpu_bytes(plan))
    except ExportError as error:
        raise ExportError(f"{error}. {_what_replanning_costs(plan, model, engine)}") from None


def plan_for(plan: Plan, model: Model, engine: str) -> Plan:
    """Make the fastest plan of a plan's own workload and budget that an engine can run.

    Raises what ``ask_again`` and ``make_plan`` do.
    """
    question = ask_again(plan, model=model)
    # a plan for throughput has chosen its batch
    goal = plan.goal.model_copy(update={"engine": engine, "objective": "latency"})
    made = make_plan(replace(question, goal=goal, store="host")).plan
    return plan.model_copy(update=dict(made))  # whose paths start where the plan's do


def describe_cost(plan: Plan, made: Plan) -> str:
    """Say what a request takes by a plan that was made for an engine, beside the plan itself."""
    share = made.prediction.objective_s / plan.prediction.objective_s - 1
    return f"{100 * abs(share):.1f} % {'longer' if share >= 0 else 'shorter'} a request"


def _what_replanning_costs(plan: Plan, model: Model, engine: str) -> str:
    title = find_engine(engine)[0].title
    try:
        made = plan_for(plan, model, engine)
    except InfeasibleError as error:
        return f"Nor would --replan help: {error}"
    except OffplanError as error:
        return f"--replan exports the fastest plan that {title} can run, but not here: {error}"
    cost = describe_cost(plan, made)
    return f"--replan exports the fastest plan that {title} can run, predicted {cost}"


def _gpu_bytes(plan: Plan) -> int | None:
    """Bytes of the GPU that a plan was made for; None where no profile keeps them."""
    try:
        profile = open_planned_profile(plan)
    except ProfileError:
        return None
    return None if profile is None else profile.gpu_memory.value
