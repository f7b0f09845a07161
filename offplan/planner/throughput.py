"""The batch that gives most tokens a second."""

from offplan.errors import InfeasibleError
from offplan.plan import Plan
from offplan.planner.aims import NEVER
from offplan.planner.find import PlanResult, find_floor_of, find_plan
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space, find_room

MOST_BATCH = 4096
"""Larger batches are not tried."""


def plan_throughput(question: Question) -> PlanResult | None:
    """Find a batch whose plan gives most tokens a second within the targets.

    Every power of two that fits is tried. Memory spent on KV cache instead of weights may pay again
    after it did not. If layer times were measured, a larger batch may be the one that keeps a
    target. Then steps of a half of the best power, of a quarter and so on to one are tried, up and
    down from the best. Returns None if no batch has a plan.
    """
    best: PlanResult | None = None
    tried: set[int] = set()
    routing = question.stage.routing

    def attempt(batch: int) -> None:
        """Keep the plan of a batch if it is the best."""
        nonlocal best
        tried.add(batch)
        if routing is not None and all(each.batch != batch for each in routing.batches):
            return  # how such a batch chooses experts was not recorded
        sized = question.with_workload(batch=batch)
        below_s = NEVER if best is None else batch * best.best_s / best.plan.workload.batch
        searcher = Searcher(Space(sized))
        if not any(_may_fit(space) for space in searcher.spaces):
            return
        if find_floor_of(searcher, sized.budget).objective_s >= below_s:
            return  # no plan can be as fast
        try:
            best = find_plan(searcher, sized, below_s) or best
        except InfeasibleError:
            return

    for power in reversed(range(MOST_BATCH.bit_length())):  # the largest rules out most others
        attempt(2**power)
    if best is None:
        return None
    step = best.plan.workload.batch
    while step := step // 2:
        batch = best.plan.workload.batch
        for other in (batch - step, batch + step):
            if other not in tried and other <= MOST_BATCH:
                attempt(other)
    return best


def _may_fit(space: Space) -> bool:
    """Return True if the budget has room for all that is no layer's weight."""
    layers_bytes = space.stage.loaded_bytes - space.stage.outside_bytes
    return bool(find_room(space, space.question.budget).lacking_bytes.min() <= layers_bytes)


def tokens_per_s(plan: Plan) -> float:
    """Output tokens of all sequences a second over the whole request, prompt included."""
    workload = plan.workload
    return workload.batch * workload.output_tokens / plan.prediction.objective_s
