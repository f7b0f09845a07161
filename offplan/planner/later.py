"""The experts that a plan's link may bring for later: as many as the step leaves it time for."""

from offplan.capabilities.cached_experts import LATER_PARTS, ExpertSlots
from offplan.costs.cached_experts import later_parts
from offplan.costs.predict import price_stage
from offplan.plan import Offload
from offplan.planner.cached_experts import ROUNDS
from offplan.planner.question import Question


def settle_later(question: Question, offload: Offload) -> Offload:
    """Return a decision whose rules bring for later what the link is idle for in its own step.

    A step that finds more is shorter, and leaves the link less time: both follow from each other.
    """
    if not any(rule.divides_missed for rule in offload.rules):
        return offload
    for _ in range(ROUNDS):
        parts = _count_parts(question, offload)
        before, offload = offload, _with_later(offload, parts)
        if offload == before:
            return offload
    return _with_later(offload, min(parts, _count_parts(question, offload)))


def _count_parts(question: Question, offload: Offload) -> int:
    """Count the LATER_PARTS of an expert of each layer that the link has time for in a step."""
    machine, found = question.planned_machine, []
    for stage in question.hold(offload):
        placement, _, _, times = price_stage(stage, machine, question.workload, offload)
        slots = placement.caches_of(ExpertSlots).values()
        expert_bytes = sum(each.expert_bytes for each in slots if each.by_cores)
        if expert_bytes:
            idle_ps = float(times.decode.step_ps) - times.decode.awaited_ps
            found.append(later_parts(idle_ps, expert_bytes, machine))
    return min(found, default=0)


def _with_later(offload: Offload, parts: int) -> Offload:
    later = {"later_experts": parts / LATER_PARTS if parts else None}
    rules = tuple(
        rule.model_copy(update=later) if rule.divides_missed else rule for rule in offload.rules
    )
    return offload.model_copy(update={"rules": rules})
