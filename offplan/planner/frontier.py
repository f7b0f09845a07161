"""GPU memory against speed: the best plan of each budget, from the least that fits to all."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from offplan.checkpoint.model import Model
from offplan.costs.memory import MARGIN
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Plan, Workload
from offplan.planner.make import can_plan, make_plan
from offplan.planner.problem import Problem, Restriction, pose

NUM_POINTS = 12
"""Budgets tried, evenly spaced."""
RESOLUTION = 200
"""The smallest budget shown is at most this part of the largest above what fits."""
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """The best plan of one budget."""

    plan: Plan
    saved_per_gib_s: float | None
    """What one more GiB takes off a request, on the way to the next point; None at the last."""


def find_frontier(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    restriction: Restriction | None = None,
) -> tuple[Point, ...]:
    """Plan for budgets from the least that fits up to where everything does.

    No budget exceeds ``budget``, whose host memory holds for all. Raises InfeasibleError when not
    even ``budget`` fits.
    """
    enough = _enough_for_all(model, machine, workload)
    most = min(budget.gpu_memory, enough, machine.gpu_memory.value)

    def budget_of(gpu_memory: int) -> Budget:
        return Budget(gpu_memory=gpu_memory, host_memory=budget.host_memory)

    def plan_for(gpu_memory: int) -> Plan:
        within = budget_of(gpu_memory)
        return make_plan(model, machine, workload, within, restriction=restriction).plan

    def fits(gpu_memory: int) -> bool:
        return can_plan(pose(model, machine, workload, budget_of(gpu_memory), restriction))

    last = plan_for(most)
    low = _least_that_fits(fits, most)
    sizes = [low + (most - low) * i // (NUM_POINTS - 1) for i in range(NUM_POINTS - 1)]
    plans = [plan_for(size) for size in sorted(set(sizes) - {most})]
    points = []
    for plan, following in pairwise([*plans, last]):
        saved = plan.prediction.objective_s - following.prediction.objective_s
        more = (following.budget.gpu_memory - plan.budget.gpu_memory) / GIB
        points.append(Point(plan, saved / more))
    return (*points, Point(last, None))


def _enough_for_all(model: Model, machine: MachineProfile, workload: Workload) -> int:
    """The least GPU memory with which nothing is offloaded."""
    nothing = Budget(gpu_memory=0)
    settings = Problem(model, machine, workload, nothing).settings
    lacking = min(setting.lacking_bytes for setting in settings if setting.embeddings == "device")
    return round(lacking / (1 - MARGIN)) + 2  # two bytes for what is rounded


def _least_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """A budget that fits, within RESOLUTION of ``most`` above one that does not."""
    low, high = 0, most
    while high - low > most // RESOLUTION:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
