"""The longest context whose plan fits."""

from offplan.costs.threshold import least_that
from offplan.plan import MOST, MOST_CACHED
from offplan.planner.aims import Nearest, limits_ps
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space


def find_longest_context(question: Question, most: int | None = None) -> int | None:
    """Find the longest context for which a plan keeps a question's budget and targets.

    It holds the workload's prompt and output, and is no longer than ``most`` tokens, by default
    what the model was trained for, nor than an engine serves. None where not even the shortest
    such context fits.
    """
    workload = question.workload
    shortest = workload.prompt_tokens + workload.output_tokens
    architecture = question.model.architecture
    most = most or architecture.trained_context or MOST
    if question.goal.engine is not None:
        most = min(most, architecture.engine_context or most)
    most = max(shortest, min(most, MOST, MOST_CACHED // workload.batch))
    if not _fits(question, shortest):
        return None
    if _fits(question, most):
        return most
    # a longer context never needs less memory
    return least_that(lambda context: not _fits(question, context), shortest, most) - 1


def _fits(question: Question, context: int) -> bool:
    """Whether a plan keeps the budget and the targets at this context."""
    searcher = Searcher(Space(question.with_workload(context=context)))
    best = find_best(searcher, question.budget, Nearest(limits_ps(question.goal))).best
    return best is not None and best.value <= 1
