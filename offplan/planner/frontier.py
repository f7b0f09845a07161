"""Memory against speed: the best plan of each budget, from the least that fits to all."""

from dataclasses import dataclass, replace
from itertools import pairwise

from offplan.costs.memory import MARGIN
from offplan.costs.term import least_that
from offplan.errors import InfeasibleError
from offplan.hostmem.limits import lockable_bytes, sold_sizes
from offplan.plan import Plan
from offplan.planner.aims import Fastest
from offplan.planner.find import PlanResult, find_plan
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space, find_room
from offplan.progress import Progress
from offplan.stores import STORES

NUM_POINTS = 12
"""Budgets tried, at least: the ends, all cards' sizes between them, and halves of the gaps."""
RESOLUTION = 200
"""The smallest budget shown is at most this part of the largest above what fits."""
GIB = 2**30
CARDS_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 288)
"""GPU memory of the cards that people have, in GiB, as their vendors name it."""


@dataclass(frozen=True)
class Point:
    """The best plan of one budget."""

    plan: Plan
    saved_per_gib_s: float | None
    """Seconds that one more GiB takes off the fastest request, on the way to the next point; None
    at the last. It is never negative, which chosen plans would not promise: they may take up to
    ALIKE times as long as the fastest."""


@dataclass(frozen=True)
class RamPoint:
    """The best plan of a machine with so much memory."""

    ram_bytes: int
    """Memory of the machine."""
    plan: Plan


def find_ram_frontier(question: Question) -> tuple[RamPoint, ...]:
    """Plan for machines with Linux, from the least memory that fits up to where more is no faster.

    All have the question's GPU memory. None is found if weights lie in no host memory, or if no
    machine has enough.
    """
    if not STORES[question.store].is_host:
        return ()
    points: list[RamPoint] = []
    searcher = Searcher(Space(question, draft=question.goal.asked_draft))
    for ram in sold_sizes():
        budget = question.budget.model_copy(update={"host_memory": lockable_bytes(ram, "linux")})
        try:
            found = find_plan(searcher, replace(question, budget=budget))
        except InfeasibleError:
            continue
        assert found is not None, "a plan without targets is wanted"
        if points and found.plan.offload == points[-1].plan.offload:
            break
        points.append(RamPoint(ram, found.plan))
    return tuple(points) if any(p.plan.prediction.host_memory_bytes for p in points) else ()


def find_frontier(question: Question, on_progress: Progress | None = None) -> tuple[Point, ...]:
    """Plan for budgets from the least that fits up to where everything does.

    No budget exceeds the question's, whose host memory holds for all. ``on_progress`` hears (points
    found, points in all). Raises InfeasibleError when not even the question's budget fits.
    """
    searcher = Searcher(Space(question, draft=question.goal.asked_draft))
    space = searcher.space

    def plan_for(gpu_memory: int) -> PlanResult:
        found = find_plan(searcher, question.with_gpu_memory(gpu_memory))
        assert found is not None, "a plan without targets is wanted"
        return found

    def fits(gpu_memory: int) -> bool:
        budget = question.with_gpu_memory(gpu_memory).budget
        return find_best(searcher, budget, Fastest((0, 0)), max_rules=1).best is not None

    most = min(question.budget.gpu_memory, _enough_for_all(space))
    last = plan_for(most)
    low = least_that(fits, 0, most, most // RESOLUTION)
    *sizes, _ = sorted(spread_budgets(low, most))
    results = []
    for number, size in enumerate(sizes, 1):
        results.append(plan_for(size))
        if on_progress is not None:
            on_progress(number, len(sizes))
    points = []
    for result, following in pairwise([*results, last]):
        saved = result.best_s - following.best_s
        more = (following.plan.budget.gpu_memory - result.plan.budget.gpu_memory) / GIB
        points.append(Point(result.plan, saved / more))
    return (*points, Point(last.plan, None))


def spread_budgets(low: int, most: int) -> set[int]:
    """Choose budgets from ``low`` to ``most``, both of them among these."""
    sizes = {low, most, *(size * GIB for size in CARDS_GIB if low < size * GIB < most)}
    while len(sizes) < min(NUM_POINTS, most - low + 1):
        below, above = max(pairwise(sorted(sizes)), key=lambda gap: gap[1] - gap[0])
        sizes.add((below + above) // 2)
    return sizes


def _enough_for_all(space: Space) -> int:
    """Return the least GPU memory with which nothing is offloaded."""
    nothing = space.question.with_gpu_memory(0).budget
    lacking = find_room(space, nothing).missing_bytes + space.stage.layout.padding_bytes
    return round(lacking / (1 - MARGIN)) + 2  # two bytes for what is rounded
