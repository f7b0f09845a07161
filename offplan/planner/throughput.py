"""The batch that gives most tokens a second."""

from dataclasses import replace

from offplan.errors import InfeasibleError
from offplan.plan import Plan
from offplan.planner.aims import NEVER
from offplan.planner.make import PlanResult, find_plan, make_plan
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from offplan.question import Question

MOST_BATCH = 4096
"""Larger batches are not tried."""


def plan_throughput(question: Question) -> PlanResult:
    """Find a batch whose plan gives most tokens a second within the targets.

    Every power of two that fits is tried: memory spent on KV cache instead of weights may pay again
    after it did not, and where layer times were measured a larger batch may be the one that keeps a
    target. Then steps of a half of the best power, of a quarter and so on down to one are tried,
    up and down from the best so far.
    Raises InfeasibleError as ``make_plan`` does for a single sequence, when no batch has a plan.
    """
    best: PlanResult | None = None
    tried: set[int] = set()

    def attempt(batch: int) -> None:
        """Keep the plan of a batch if it is the best."""
        nonlocal best
        tried.add(batch)
        sized = question.with_batch(batch)
        tokens = batch * question.workload.output_tokens
        below_s = NEVER if best is None else tokens / tokens_per_s(best.plan)
        try:
            found = find_plan(Searcher(Space(sized)), sized, below_s)
        except InfeasibleError:
            return
        if found is not None and (best is None or _speed(found) > _speed(best)):
            best = found

    for power in reversed(range(MOST_BATCH.bit_length())):  # the largest rules out most others
        attempt(2**power)
    if best is None:
        goal = question.goal.model_copy(update={"objective": "latency"})
        return make_plan(replace(question.with_batch(1), goal=goal))
    step = best.plan.workload.batch
    while step := step // 2:
        batch = best.plan.workload.batch
        for other in (batch - step, batch + step):
            if other not in tried and other <= MOST_BATCH:
                attempt(other)
    return best


def tokens_per_s(plan: Plan) -> float:
    """Output tokens of all sequences a second over the whole request, prompt included."""
    workload = plan.workload
    return workload.batch * workload.output_tokens / plan.prediction.objective_s


def _speed(result: PlanResult) -> float:
    return tokens_per_s(result.plan)
