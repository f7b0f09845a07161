"""``make_plan``: a model, a machine, a workload and a budget in; the fastest plan that fits out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from offplan.checkpoint.model import Model
from offplan.costs.memory import MARGIN
from offplan.costs.predict import predict
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import (
    Backend,
    Basis,
    Budget,
    MachineRef,
    ModelRef,
    Plan,
    Prediction,
    Rule,
    Workload,
)
from offplan.planner.classes import price_classes
from offplan.planner.floor import Floor, find_floor
from offplan.planner.problem import Problem, Restriction, pose
from offplan.planner.search import Search, find_best
from offplan.planner.space import list_singles
from offplan.planner.targets import NO_TARGETS, Fastest, Nearest, Targets
from offplan.units import format_bytes, format_bytes_enough, format_seconds

RESOLUTION = 100
"""The memory that would reach a target is found to this part of itself."""


@dataclass(frozen=True)
class PlanResult:
    """A plan, and why it is this one."""

    plan: Plan
    reasons: tuple[str, ...]
    """Sentences for people."""
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


def make_plan(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    targets: Targets = NO_TARGETS,
    restriction: Restriction | None = None,
) -> PlanResult:
    """Find the fastest plan that keeps budget and targets: prompt plus all output tokens.

    Exact over the stated spaces: at most one rule over the segment classes, all group patterns,
    ring sizes, backends and chunks, the input embedding in either place (``planner.space``), and
    two or three rules (``planner.combinations``); with a ``restriction`` those of the first that it
    allows. The same input gives the same plan, byte for byte. Raises
    InfeasibleError when no candidate fits, with the shortfall, and when none keeps the targets,
    with the nearest (exactly: no plan's worse excess is less) and the GPU memory that would do.
    """
    problem = pose(model, machine, workload, budget, restriction)
    found = find_plan(problem, targets)
    if found is None:
        raise _unreachable(problem, targets)
    return found


def find_plan(problem: Problem, targets: Targets) -> PlanResult | None:
    """Do what ``make_plan`` does; None where plans fit, but none keeps the targets."""
    found = find_best(problem, Fastest(problem.weights, targets.limits_ps))
    if found is None:
        if not targets or not can_plan(problem):
            raise _infeasible(problem)
        return None
    plan, floor = _write_plan(problem, found), find_floor(problem)
    reasons = _explain(plan, floor, found)
    if targets:
        reasons += (f"of the plans that keep {targets}, this is the fastest",)
    if problem.restriction is not None:
        reasons += (f"only plans that {problem.restriction.engine} can run were searched",)
    return PlanResult(
        plan,
        reasons,
        found.num_candidates,
        found.num_priced,
        found.second_rule_gain,
        found.max_rules,
        floor,
    )


def can_plan(problem: Problem, targets: Targets = NO_TARGETS) -> bool:
    """Whether any plan keeps budget and targets."""
    any_plan = Fastest((0, 0), targets.limits_ps)
    return find_best(problem, any_plan) is not None


def _write_plan(problem: Problem, found: Search) -> Plan:
    model, machine, workload = problem.model, problem.machine, problem.workload
    offload = found.chosen.offload.model_copy(update={"store": machine.store})
    return Plan(
        model=ModelRef(
            source=model.source,
            revision=model.revision,
            headers_sha256=model.headers_sha256,
            dtype=model.dtype,
        ),
        workload=workload,
        budget=problem.budget,
        machine=MachineRef(
            name=machine.name,
            link=machine.link,
            h2d=machine.h2d.value,
            uva=machine.uva.value,
            basis=Basis(machine.basis),
            fingerprint=machine.fingerprint,
        ),
        offload=offload,
        prediction=predict(model, machine, workload, problem.budget, offload),
    )


def _unreachable(problem: Problem, targets: Targets) -> InfeasibleError:
    """Say how near the targets plans come, and how much GPU memory would do."""
    budget = problem.budget
    memory = format_bytes(budget.gpu_memory)
    found = find_best(problem, Nearest(targets.limits_ps))
    assert found is not None, "a plan without targets fits"

    def reaches(gpu_memory: int) -> bool:
        roomier = budget.model_copy(update={"gpu_memory": gpu_memory})
        return can_plan(replace(problem, budget=roomier), targets)

    enough = _least(reaches, budget.gpu_memory, problem.machine.gpu_memory.value)
    helps = "no GPU memory of this machine would do"
    if enough is not None:
        helps = f"{format_bytes(enough)} of GPU memory would do"
    nearest = _write_plan(problem, found).prediction
    return InfeasibleError(
        f"no plan reaches {targets} within {memory}: the nearest has its first token after "
        f"{format_seconds(nearest.prefill.step_s)} and takes "
        f"{format_seconds(nearest.decode.step_s)} a token; {helps}",
        None if enough is None else enough - budget.gpu_memory,
    )


def _least(reaches: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least memory above ``low`` that reaches the targets; None if ``most`` does not.

    More memory never makes a plan worse, so halving finds it, to one part in RESOLUTION.
    """
    if most <= low or not reaches(most):
        return None
    high = most
    while high - low > high // RESOLUTION:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _infeasible(problem: Problem) -> InfeasibleError:
    """Say what is missing and what would help."""
    budget = problem.budget
    shortfall = list_singles(problem, price_classes(problem)).shortfall
    if problem.restriction is not None and not (shortfall.gpu_bytes or shortfall.host_bytes):
        return InfeasibleError(
            f"no plan that {problem.restriction.engine} can run fits "
            f"{format_bytes(budget.gpu_memory)}, though others do"
        )
    if shortfall.gpu_bytes:
        lack = -(-shortfall.gpu_bytes * 1000 // round(1000 * (1 - MARGIN)))
        smallest = min(problem.settings, key=lambda setting: setting.lacking_bytes)
        fixed = problem.model.outside_bytes - smallest.host_bytes
        weights = problem.model.loaded_bytes - smallest.host_bytes
        taken = smallest.lacking_bytes + budget.gpu_memory - weights
        return InfeasibleError(
            f"no plan fits {format_bytes(budget.gpu_memory)} of GPU memory: "
            f"{format_bytes_enough(lack)} more are needed. Of what lies outside the layers "
            f"{format_bytes(fixed)} are always on the GPU; KV cache, "
            f"activations and overhead take {format_bytes(taken)}. Give more GPU memory, or "
            f"shorten the context ({problem.workload.context} tokens) or the batch "
            f"({problem.workload.batch})",
            lack,
        )
    lack = shortfall.host_bytes or 0  # of plans of one rule: others may lack less
    return InfeasibleError(
        f"no plan fits {format_bytes(budget.host_memory or 0)} of {problem.machine.store} memory: "
        f"up to {format_bytes_enough(lack)} more are needed to hold what the GPU "
        f"({format_bytes(budget.gpu_memory)}) cannot. Give more of either",
        lack,
    )


def _explain_space(plan: Plan, found: Search) -> Iterator[str]:
    """Say what was searched exactly."""
    yield (
        f"{found.num_candidates} plans of one rule fit; {found.num_priced} plans were priced, and "
        "bounds rule out the others"
    )
    if len(plan.offload.rules) > 1:
        yield f"the best plan of one rule takes {100 * (found.second_rule_gain - 1):.1f} % longer"
    if found.max_rules > 1:
        most = {2: "two", 3: "three"}[found.max_rules]
        yield f"no plan of up to {most} rules is faster"


def _describe_places(prediction: Prediction) -> str:
    """Say how many bytes of weights lie where, off the GPU."""
    places = (("host", prediction.host_memory_bytes), ("peer", prediction.peer_memory_bytes))
    return " and ".join(f"{format_bytes(size)} on the {name}" for name, size in places if size)


def _explain(plan: Plan, floor: Floor, found: Search) -> tuple[str, ...]:
    memory, prediction = plan.prediction.gpu_memory, plan.prediction
    if not plan.offload.rules and plan.offload.embeddings == "device":
        return (
            f"everything fits: {format_bytes(memory.total_bytes)} of "
            f"{format_bytes(plan.budget.gpu_memory)}, so nothing is offloaded",
        )
    reasons = [
        f"at least {format_bytes(floor.missing_bytes)} of weights do not fit "
        f"{format_bytes(plan.budget.gpu_memory)} beside KV cache, activations and overhead; the "
        f"plan keeps {_describe_places(prediction)}",
        *_explain_space(plan, found),
    ]
    if plan.offload.embeddings == "host":
        reasons.append(
            "of the input embedding only a row a token is read, so it lies on the host and leaves "
            "its place to layers; no engine's flag says that"
        )
    for name, phase in (("prefill", prediction.prefill), ("decode", prediction.decode)):
        holds = "compute" if phase.compute_s >= phase.link_s else "the link"
        # only what nobody in the pass waits for can be under way after its end
        ahead = " (the next step's copies included)" if phase.link_s > phase.step_s else ""
        reasons.append(
            f"{name} is held by {holds}: {format_seconds(phase.compute_s)} of compute, "
            f"{format_seconds(phase.link_s)} of link{ahead}, {format_seconds(phase.step_s)} in all"
        )
    reasons += [_explain_backends(rule) for rule in plan.offload.rules if rule.is_mixed]
    return tuple(reasons)


def _explain_backends(rule: Rule) -> str:
    """Say why a rule has one backend for a prompt and another for a decode step."""
    what = " and ".join(rule.cpu_offload_params) or "all parameters of its layers"
    if rule.decode is Backend.UVA:
        return f"a prompt needs all of {what} and copies it; a decode step reads its part in place"
    return f"a decode step copies {what} ahead of its layers; a prompt reads it in place"
