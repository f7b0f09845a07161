"""``make_plan``: a question in, the fastest plan that keeps its budget and targets out."""

from dataclasses import dataclass

from offplan.costs.floor import Floor, find_floor
from offplan.costs.predict import predict
from offplan.costs.threshold import least_that
from offplan.costs.timeline import PS_PER_S
from offplan.errors import InfeasibleError
from offplan.plan import Offload, Plan
from offplan.planner.aims import NEVER, Fastest, Nearest, limits_ps
from offplan.planner.infeasible import explain_infeasible
from offplan.planner.search import MAX_RULES, Searcher
from offplan.planner.space import Room, Space, find_room
from offplan.question import Question
from offplan.units import format_bytes, format_seconds

RESOLUTION = 100
"""The memory that would reach a target is found to this part of the budget."""


@dataclass(frozen=True)
class PlanResult:
    """A plan, and what it took to find it."""

    plan: Plan
    num_candidates: int
    """Plans of at most one rule that fit the budget."""
    num_priced: int
    """Plans whose timeline was run; proven bounds ruled out all others."""
    second_rule_gain: float
    """Time of the best plan of at most one rule over this plan's; 1 where it has no second."""
    max_rules: int
    """The search was exact over plans of up to so many rules."""
    floor: Floor
    """What no plan of this budget can beat."""

    @property
    def gap(self) -> float:
        """The plan's time over the floor's; 1 is the best there can be."""
        return self.plan.prediction.objective_s / self.floor.objective_s


def make_plan(question: Question) -> PlanResult:
    """Find the plan that a question asks for.

    With the objective ``latency`` that is the one of the least time for prompt and output tokens;
    with ``throughput`` the batch of most tokens a second is chosen first. Exact over the space that
    ``planner.space`` states; the same question gives the same plan, byte for byte. Raises
    InfeasibleError when no plan fits, with the shortfall, and when none keeps the targets, with the
    nearest (exactly: no plan's worse excess is less) and the GPU memory that would do.
    """
    if question.goal.objective == "throughput":
        from offplan.planner.throughput import plan_throughput  # it makes plans of its own

        return plan_throughput(question)
    searcher = Searcher(Space(question))
    if question.goal.targets:
        # first, so that a request's time is never looked for among plans that are too slow
        room, aim = find_room(searcher.space, question.budget), Nearest(limits_ps(question.goal))
        nearest = searcher.find(room, aim)
        if nearest.best is None:
            raise explain_infeasible(searcher.space, question, nearest)
        if nearest.best.value > 1:
            raise _unreachable(searcher, question, aim, nearest.best.offload)
    found = find_plan(searcher, question)
    assert found is not None, "a plan that keeps the targets fits"
    return found


def find_plan(searcher: Searcher, question: Question, below_s: float = NEVER) -> PlanResult | None:
    """Find the plan of a question about a searcher's space, of requests of less than ``below_s``.

    None where plans fit, but none keeps the targets or is as fast. Raises InfeasibleError when none
    fits.
    """
    space, goal = searcher.space, question.goal
    room, limits = find_room(space, question.budget), limits_ps(goal)
    search = searcher.find(room, Fastest(space.weights, limits), below_s * PS_PER_S)
    if search.best is None:
        if search.gpu_lack or search.host_lack or (below_s == NEVER and not goal.targets):
            raise explain_infeasible(space, question, search)
        return None
    return PlanResult(
        plan=_write_plan(space, question, search.best.offload),
        num_candidates=search.num_candidates,
        num_priced=search.num_priced,
        second_rule_gain=search.second_rule_gain,
        max_rules=1 if goal.engine else MAX_RULES,
        floor=_find_floor(space, room),
    )


def _find_floor(space: Space, room: Room) -> Floor:
    """Find the floor, with memory from the chunks that need least and compute from the fastest."""
    question = space.question
    pairs = zip(space.settings, room.lacking_bytes.tolist(), strict=True)
    missing = max(0, min(lacking for each, lacking in pairs if each.embeddings == "device"))
    fastest = min(each.prefill.resident_ps for each in space.settings), space.decode.resident_ps
    return find_floor(question.model, space.machine, question.workload, missing, fastest)


def _write_plan(space: Space, question: Question, offload: Offload) -> Plan:
    workload, budget = question.workload, question.budget
    prediction = predict(question.model, space.machine, workload, budget, offload)
    return question.answer(offload, prediction)


def _unreachable(
    searcher: Searcher, question: Question, aim: Nearest, offload: Offload
) -> InfeasibleError:
    """Say how near the targets the nearest plan comes, and how much GPU memory would do.

    The memory is looked for among plans of one rule: it is enough, if not always the least.
    """
    space, budget = searcher.space, question.budget

    def reaches(gpu_memory: int) -> bool:
        room = find_room(space, question.with_gpu_memory(gpu_memory).budget)
        best = searcher.find(room, aim, max_rules=1).best
        return best is not None and best.value <= 1

    enough, helps = None, "no GPU memory of this machine would do"
    most = space.machine.gpu_memory.value
    if most > budget.gpu_memory and reaches(most):
        # more memory never makes a plan worse
        enough = least_that(reaches, budget.gpu_memory, most, budget.gpu_memory // RESOLUTION)
        helps = f"{format_bytes(enough)} of GPU memory would do"
    nearest = _write_plan(space, question, offload).prediction
    return InfeasibleError(
        f"no plan reaches {question.goal.targets} within {format_bytes(budget.gpu_memory)}: the "
        f"nearest has its first token after {format_seconds(nearest.prefill.step_s)} and takes "
        f"{format_seconds(nearest.decode.step_s)} a token; {helps}",
        None if enough is None else enough - budget.gpu_memory,
    )
