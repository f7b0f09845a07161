"""The check that a runner can run a plan: an engine's flags may not say it."""

from collections.abc import Callable
from functools import cache

from offplan.costs.predict import predict
from offplan.held.held import Held
from offplan.held.runner import Demand
from offplan.plan import Budget, Offload, Packing
from offplan.planner.space import Space


def make_check(space: Space) -> Callable[[Offload, Budget], bool]:
    """Return what tells whether a space's runner can run a plan, and what it takes then fits."""
    question = space.question
    if space.runner.checker(question.held.stages) is None:
        return lambda _, __: True

    @cache
    def check_by(packing: Packing | None) -> tuple[Held, Callable[[Offload], Demand | None]]:
        held = question.held.pack(packing)  # a rival may be of another packing than the space
        check = held.runner.checker(held.stages)
        assert check is not None
        return held, check

    def can_run(offload: Offload, budget: Budget) -> bool:
        held, check = check_by(offload.packing)
        demand, host = check(offload), budget.host_memory
        if demand is None or (host is not None and demand.pinned_bytes > host):
            return False
        if demand.more_gpu_bytes <= 0 and question.goal.pipeline_parallel == 1 and host is None:
            return True
        taken = predict(held, space.machine, question.workload, budget, offload)
        fits_host = host is None or taken.host_memory_bytes <= host
        more = max(0, demand.more_gpu_bytes)
        return fits_host and taken.gpu_memory.total_bytes + more <= budget.gpu_memory

    return can_run
