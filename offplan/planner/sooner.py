"""A plan whose first token comes much sooner, for hardly any more time of the whole request."""

from dataclasses import replace

from offplan.costs.timeline import PS_PER_S
from offplan.plan import Plan
from offplan.planner.find import PlanResult, write_plan
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space

WORTH_TELLING = 1.5
"""Times that the first token has to come sooner. Source: chosen."""
HARDLY_MORE = 1.02
"""Most that the request may take, over the fastest one. Source: chosen."""


def find_sooner(question: Question, result: PlanResult) -> Plan | None:
    """Find the fastest such plan; its goal is a target.

    None where there is none, and where the question has a goal that is not a request's time.
    """
    goal, fastest = question.goal, result.plan.prediction
    # as people would type it
    wanted_s = float(f"{fastest.prefill.step_s / WORTH_TELLING:.2g}")
    if goal.targets or goal.objective != "latency" or wanted_s < result.floor.prefill_s:
        return None
    asked = replace(question, goal=goal.model_copy(update={"max_ttft_s": wanted_s}))
    searcher = Searcher(Space(asked))
    most_ps = HARDLY_MORE * PS_PER_S * fastest.objective_s
    best = find_best(searcher, asked.budget, searcher.fastest, most_ps).best
    if best is None:
        return None
    return write_plan(searcher, asked, best.offload)
