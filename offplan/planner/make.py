"""``make_plan``: a question in, the fastest plan that keeps its budget and targets out."""

from offplan.costs.term import least_that
from offplan.errors import InfeasibleError
from offplan.plan import Offload
from offplan.planner.aims import Nearest
from offplan.planner.drafts import choose_drafts, find_only_with
from offplan.planner.find import PlanResult, find_plan, plan_throughput
from offplan.planner.infeasible import RESOLUTION, explain_infeasible
from offplan.planner.longest import find_longest_context
from offplan.planner.packed import find_best, reaches
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from offplan.units import format_budget, format_bytes, format_seconds


def make_plan(question: Question) -> PlanResult:
    """Find the plan that a question asks for.

    With the objective ``latency`` the plan takes, to 1 %, the least time for prompt and output
    tokens. Of such plans it is the one whose first token times step is least, then of the fewest
    rules. With ``throughput`` the batch of most tokens a second is chosen first. The same question
    gives the same plan, byte for byte. Raises InfeasibleError with the shortfall if no plan fits.
    If none keeps the targets, the error names the nearest plan and the GPU memory that would do. It
    also names the longest context that has a plan, if a shorter one has.
    """
    try:
        return try_plan(question)
    except InfeasibleError as error:
        error.longest_context = find_longest_context(question, question.workload.context)
        raise


def try_plan(question: Question) -> PlanResult:
    """Find the plan that a question asks for, as ``make_plan`` does.

    The error of a question without a plan names no shorter context, which takes searches to find.
    """
    if question.goal.objective == "throughput":
        if best := plan_throughput(question):
            return best
        # a single sequence says what is missing
        question = question.for_one_sequence()
    return _make_latency_plan(question)


def _make_latency_plan(question: Question) -> PlanResult:
    """Find the plan of the least time for a request at the workload's batch."""
    searcher = Searcher(Space(question, draft=question.goal.asked_draft))
    if question.goal.targets:
        # first, so that a request's time is never looked for among plans that are too slow
        nearest = find_best(searcher, question.budget, Nearest(searcher.space.limits_ps))
        if nearest.best is None:
            raise explain_infeasible(searcher, question, nearest)
        if nearest.best.value > 1:
            if (drafted := find_only_with(question)) is not None:
                return drafted
            raise _unreachable(searcher, question, nearest.best.offload)
    found = find_plan(searcher, question)
    assert found is not None, "a plan that keeps the targets fits"
    return choose_drafts(question, found)


def _unreachable(searcher: Searcher, question: Question, offload: Offload) -> InfeasibleError:
    """Say how near the targets the nearest plan comes, and how much GPU memory would do."""
    budget, most = question.budget, searcher.space.machine.gpu_memory.value

    def is_enough(gpu_memory: int) -> bool:
        return reaches(searcher, question.with_gpu_memory(gpu_memory).budget)

    enough, helps = None, "no GPU memory of this machine would do"
    if most > budget.gpu_memory and is_enough(most):
        # more memory never makes a plan worse
        enough = least_that(is_enough, budget.gpu_memory, most, budget.gpu_memory // RESOLUTION)
        helps = f"{format_bytes(enough)} of GPU memory would do"
    nearest = question.predict(offload)
    return InfeasibleError(
        f"no plan reaches {question.goal.targets} within {format_budget(budget.gpu_memory)}: the "
        f"nearest has its first token after {format_seconds(nearest.prefill.step_s)} and takes "
        f"{format_seconds(nearest.decode.step_s)} a token; {helps}",
        None if enough is None else enough - budget.gpu_memory,
    )
