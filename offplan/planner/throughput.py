"""The batch that gives most tokens a second."""

from dataclasses import replace

from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Plan, Workload
from offplan.planner.make import PlanResult, find_plan, make_plan
from offplan.planner.problem import Restriction, pose
from offplan.planner.targets import NO_TARGETS, Targets

MOST_BATCH = 4096
"""Larger batches are not tried."""


def plan_throughput(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    targets: Targets = NO_TARGETS,
    restriction: Restriction | None = None,
) -> PlanResult:
    """Find a batch whose plan gives most tokens a second within the targets.

    Every power of two that fits is tried: memory spent on KV cache instead of weights may pay again
    after it did not, and where layer times were measured a larger batch may be the one that keeps a
    target. Only memory ends it, of which a larger batch always takes more. Then steps of a half of
    the best power, of a quarter and so on down to one are tried from the best so far, up and down.
    Raises InfeasibleError as ``make_plan`` does for a single sequence, when no batch has a plan.
    """
    best: PlanResult | None = None
    tried: set[int] = set()

    def attempt(batch: int) -> bool:
        """Keep the plan of a batch if it is the best; returns whether the batch fits."""
        nonlocal best
        tried.add(batch)
        sized = workload.model_copy(update={"batch": batch})
        try:
            result = find_plan(pose(model, machine, sized, budget, restriction), targets)
        except InfeasibleError:
            return False
        if result is not None and (best is None or _speed(result) > _speed(best)):
            best = result
        return True

    batch = 1
    while batch <= MOST_BATCH and attempt(batch):
        batch *= 2
    if best is None:
        single = workload.model_copy(update={"batch": 1})
        return make_plan(model, machine, single, budget, targets, restriction)
    step = best.plan.workload.batch
    while step := step // 2:
        batch = best.plan.workload.batch
        for other in (batch - step, batch + step):
            if other not in tried and other <= MOST_BATCH:
                attempt(other)
    chosen = (
        f"batch {best.plan.workload.batch} gives most of those tried: {_speed(best):,.1f} tokens/s"
    )
    return replace(best, reasons=(*best.reasons, chosen))


def tokens_per_s(plan: Plan) -> float:
    """Output tokens of all sequences over the whole request, prompt included."""
    workload = plan.workload
    return workload.batch * workload.output_tokens / plan.prediction.objective_s


def _speed(result: PlanResult) -> float:
    return tokens_per_s(result.plan)
