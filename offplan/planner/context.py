"""The longest context whose plan fits."""

from offplan.capabilities.rule import MOST
from offplan.costs.threshold import least_that
from offplan.plan import MOST_CACHED
from offplan.planner.packed import reaches
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space


def find_longest_context(question: Question, most: int | None = None) -> int | None:
    """Find the longest context for which a plan keeps a question's budget and targets.

    It has room for the workload's prompt and output. It is no longer than ``most`` tokens, by
    default what the model was trained for, nor than an engine serves. Returns None if not even the
    shortest such context fits.
    """
    workload = question.workload
    shortest = workload.prompt_tokens + workload.output_tokens
    architecture = question.model.architecture
    most = most or architecture.trained_context or MOST
    if question.goal.engine is not None:
        most = min(most, architecture.engine_context or most)
    most = max(shortest, min(most, MOST, MOST_CACHED // workload.batch))

    def is_too_long(context: int) -> bool:
        asked = question.with_workload(context=context)
        return not reaches(Searcher(Space(asked)), asked.budget)

    if is_too_long(shortest):
        return None
    if not is_too_long(most):
        return most
    # a longer context never needs less memory
    return least_that(is_too_long, shortest, most) - 1
