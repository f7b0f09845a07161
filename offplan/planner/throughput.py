"""What the user asks of a plan beyond being the fastest: times to keep, and a batch to find."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Plan, Workload
from offplan.planner.make import PlanResult, make_plan
from offplan.units import format_bytes, format_seconds

EMPHASES = (4, 16, 64, 1024)
"""How many times as much the phase that misses its target is made to count, in turn."""
MOST_BATCH = 4096
"""Larger batches are not tried."""
RESOLUTION = 100
"""The memory that would reach a target is found to this part of what the machine has."""


@dataclass(frozen=True)
class Targets:
    """Times that a plan must keep; None where any will do."""

    max_ttft_s: float | None = None
    """Of the prompt, to the first token."""
    max_tpot_s: float | None = None
    """Of a decode step."""

    def excess(self, plan: Plan) -> float:
        """How many times as long as its target the worse phase takes; 0 without targets."""
        prediction = plan.prediction
        return max(
            prediction.prefill.step_s / self.max_ttft_s if self.max_ttft_s else 0.0,
            prediction.decode.step_s / self.max_tpot_s if self.max_tpot_s else 0.0,
        )


def plan_within(
    model: Model, machine: MachineProfile, workload: Workload, budget: Budget, targets: Targets
) -> PlanResult:
    """Find the fastest plan that keeps the targets, among those that a weighing of phases finds.

    The fastest plan of all is taken if it keeps them; otherwise each phase that has a target is
    made to count more, until a plan does. Raises InfeasibleError when none does, with the nearest
    and the GPU memory that would do, and when nothing fits.
    """
    results = []
    for emphasis in _emphases(targets):
        result = make_plan(model, machine, workload, budget, emphasis)
        if targets.excess(result.plan) <= 1:
            return result if emphasis == (1, 1) else _explained(result, targets)
        results.append(result)
    nearest = min(results, key=lambda result: targets.excess(result.plan)).plan

    def reaches(gpu_memory: int) -> bool:
        within = Budget(gpu_memory=gpu_memory, host_memory=budget.host_memory)
        plans = (
            make_plan(model, machine, workload, within, emphasis).plan
            for emphasis in _emphases(targets)
        )
        return any(targets.excess(plan) <= 1 for plan in plans)

    enough = _least(reaches, nearest.budget.gpu_memory, machine.gpu_memory.value)
    raise _unreachable(targets, nearest, enough)


def plan_throughput(
    model: Model, machine: MachineProfile, workload: Workload, budget: Budget, targets: Targets
) -> PlanResult:
    """Find the batch, a power of two, whose plan gives most tokens a second within the targets.

    Every batch that fits is tried, since memory spent on KV cache instead of weights may pay again
    after it did not. Raises InfeasibleError when a single sequence has no plan.
    """
    best = plan_within(model, machine, workload.model_copy(update={"batch": 1}), budget, targets)
    batch = 2
    while batch <= MOST_BATCH:
        larger = workload.model_copy(update={"batch": batch})
        try:
            result = plan_within(model, machine, larger, budget, targets)
        except InfeasibleError:
            break
        if tokens_per_s(result.plan) > tokens_per_s(best.plan):
            best = result
        batch *= 2
    chosen = f"batch {best.plan.workload.batch} gives most: {tokens_per_s(best.plan):,.1f} tokens/s"
    return replace(best, reasons=(*best.reasons, chosen))


def tokens_per_s(plan: Plan) -> float:
    """Output tokens of all sequences over the whole request, prompt included."""
    workload = plan.workload
    return workload.batch * workload.output_tokens / plan.prediction.objective_s


def _emphases(targets: Targets) -> list[tuple[int, int]]:
    """How often prefill and decode count, in the order to try."""
    emphases = [(1, 1)]
    if targets.max_tpot_s is not None:
        emphases += [(1, times) for times in EMPHASES]
    if targets.max_ttft_s is not None:
        emphases += [(times, 1) for times in EMPHASES]
    return emphases


def _explained(result: PlanResult, targets: Targets) -> PlanResult:
    reason = f"the fastest plan misses a target; this one keeps {_describe(targets)}"
    return replace(result, reasons=(*result.reasons, reason))


def _describe(targets: Targets) -> str:
    named = (("--max-ttft", targets.max_ttft_s), ("--max-tpot", targets.max_tpot_s))
    return " and ".join(f"{name} {format_seconds(limit)}" for name, limit in named if limit)


def _least(reaches: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least memory above ``low`` that reaches the targets; None if ``most`` does not."""
    if most <= low or not reaches(most):
        return None
    high = most
    while high - low > most // RESOLUTION:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _unreachable(targets: Targets, nearest: Plan, enough: int | None) -> InfeasibleError:
    prediction, budget = nearest.prediction, nearest.budget.gpu_memory
    helps = "no GPU memory of this machine would do"
    if enough is not None:
        helps = f"{format_bytes(enough)} of GPU memory would do"
    return InfeasibleError(
        f"no plan reaches {_describe(targets)} within {format_bytes(budget)}: the nearest has its "
        f"first token after {format_seconds(prediction.prefill.step_s)} and takes "
        f"{format_seconds(prediction.decode.step_s)} a token; {helps}",
        None if enough is None else enough - budget,
    )
