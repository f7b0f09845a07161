"""The check that a runner can run a plan: an engine's flags may not say it."""

from collections.abc import Callable
from functools import cache

from offplan.errors import ExportError
from offplan.held.runner import Demand
from offplan.plan import Budget, Offload
from offplan.planner.space import Space


def make_check(space: Space) -> Callable[[Offload, Budget], bool]:
    """Return what tells whether a space's runner can run a plan, and what it takes then fits."""
    question = space.question
    if question.runner.pass_rules is None:  # it runs all that is priced
        return lambda _, __: True

    @cache
    def ask(offload: Offload) -> Demand | None:
        try:
            return question.demand(offload)
        except ExportError:
            return None

    def can_run(offload: Offload, budget: Budget) -> bool:
        # what an engine cannot move in every layer it cannot move in some: asked once for all
        everywhere = {"group_size": 1, "num_in_group": 1}
        of_all = tuple(
            rule if rule.max_bytes is not None else rule.model_copy(update=everywhere)
            for rule in offload.rules
        )
        asked = offload.model_copy(update={"prefill_chunk": 1})  # which is said elsewhere
        if ask(asked.model_copy(update={"rules": of_all, "prefetch_step": 1})) is None:
            return False
        demand, host = ask(asked), budget.host_memory
        if demand is None or (host is not None and demand.pinned_bytes > host):
            return False
        if demand.more_gpu_bytes <= 0 and question.stage.num_stages == 1 and host is None:
            return True
        # a rival may be of another recoding than the space
        taken = question.predict(offload, budget)
        fits_host = host is None or taken.host_memory_bytes <= host
        more = max(0, demand.more_gpu_bytes)
        return fits_host and taken.gpu_memory.total_bytes + more <= budget.gpu_memory

    return can_run
