"""The plan that a rank of vLLM carries out, or a refusal."""

import shlex

from offplan.capabilities.ranks import ONE_RANK, Ranks
from offplan.checkpoint.model import Model
from offplan.engines.engine import Version, family_of, format_version, join_flags
from offplan.engines.export import export_plan
from offplan.engines.runner import lower
from offplan.engines.taken import StageTaken, Taken
from offplan.engines.vllm import VLLM
from offplan.errors import ExportError
from offplan.plan import Plan
from offplan.units import format_budget


def find_taken(
    plan: Plan, model: Model, version: Version, ranks: Ranks = ONE_RANK, stage: int = 0
) -> Taken:
    """Find what a plan takes of the model as a rank of a stage of some version of vLLM builds it.

    ``model`` is whole, ``ranks`` are those that vLLM divides it among. Raises ExportError, naming
    it, for what such a worker cannot do: other ranks than the plan's, another store, and more
    memory than the budget. The worker cannot read a parameter in different ways by phase, move part
    of what vLLM fuses, or read other stored forms.
    """
    _require_ranks(plan, ranks)
    engine = f"vllm-worker=={format_version(version)}"
    export_plan(plan, model, engine)  # which refuses what cannot be done
    goal, offload = plan.goal.model_copy(update={"engine": engine}), plan.offload
    return StageTaken.find(offload, lower(model, goal, offload.recoding)[stage], version).taken


def _require_ranks(plan: Plan, ranks: Ranks) -> None:
    """Refuse ranks that the plan was not made for: what each holds is then another model."""
    goal = plan.goal
    engine = family_of(goal.engine or "vllm")
    if goal.ranks == ranks and (ranks == ONE_RANK or engine == "vllm"):
        return
    planned = f"{goal.ranks.label} of {engine}" if goal.ranks != ONE_RANK else "one GPU"
    options = f"--for vllm-worker {ranks.label}".rstrip()
    size = format_budget(plan.budget.gpu_memory).replace(" ", "")
    command = f"offplan plan {shlex.quote(plan.model.source)} {options} --gpu-memory {size}"
    as_planned = ""
    if engine == "vllm" and goal.ranks != ONE_RANK:
        as_planned = f", or start vLLM with {' '.join(join_flags(VLLM.divide(goal.ranks)))}"
    raise ExportError(
        f"the plan is for {planned}, and vLLM was started on {ranks.label or 'one GPU'}: what each "
        f"GPU holds is another model then; plan for it ({command}){as_planned}"
    )
