"""``find_plan``: the best plan of a space for one budget and its targets, if there is one."""

from dataclasses import dataclass

from offplan.costs.floor import Floor, find_floor
from offplan.costs.predict import predict
from offplan.costs.timeline import PS_PER_S
from offplan.plan import Offload, Plan
from offplan.planner.aims import NEVER, Fastest, limits_ps
from offplan.planner.infeasible import explain_infeasible
from offplan.planner.question import Question
from offplan.planner.search import MAX_RULES, Searcher
from offplan.planner.space import Room, Space, find_room


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
        plan=write_plan(space, question, search.best.offload),
        num_candidates=search.num_candidates,
        num_priced=search.num_priced,
        second_rule_gain=search.second_rule_gain,
        max_rules=1 if goal.engine else MAX_RULES,
        floor=find_floor_of(space, room),
    )


def find_floor_of(space: Space, room: Room) -> Floor:
    """Find a budget's floor: memory of the chunks that need least, compute of the fastest ones."""
    question = space.question
    pairs = zip(space.settings, room.lacking_bytes.tolist(), strict=True)
    missing = max(0, min(lacking for each, lacking in pairs if each.embeddings == "device"))
    fastest = min(each.prefill.resident_ps for each in space.settings), space.decode.resident_ps
    return find_floor(question.model, space.machine, question.workload, missing, fastest)


def write_plan(space: Space, question: Question, offload: Offload) -> Plan:
    """Write the plan of a question that offloads so, with its prediction."""
    workload, budget = question.workload, question.budget
    prediction = predict(question.model, space.machine, workload, budget, offload)
    return question.answer(offload, prediction)
