"""``make_plan``: a model, a machine, a workload and a budget in; the fastest plan that fits out."""

from dataclasses import dataclass

from offplan.checkpoint.model import Model
from offplan.costs.memory import MARGIN
from offplan.costs.predict import predict
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import Basis, Budget, MachineRef, ModelRef, Plan, Workload
from offplan.planner.families import Shortfall
from offplan.planner.floor import Floor, find_floor
from offplan.planner.problem import Problem
from offplan.planner.search import SIMPLER, Search, find_best
from offplan.planner.space import list_families
from offplan.planner.targets import NO_TARGETS, Fastest, Targets
from offplan.units import format_bytes, format_seconds


@dataclass(frozen=True)
class PlanResult:
    """A plan, and why it is this one."""

    plan: Plan
    reasons: tuple[str, ...]
    """Sentences for people."""
    num_candidates: int
    """Plans of at most one rule that fit the budget."""
    num_priced: int
    """Plans of one rule and of two whose timeline was run; proven bounds ruled out all others."""
    second_rule_gain: float
    """Time of the best plan of at most one rule over this plan's; 1 where it has no second."""
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
) -> PlanResult:
    """Find the fastest plan that keeps the budget: prompt plus all output tokens of a request.

    Exact over the stated spaces: at most one rule over the segment classes, all group patterns,
    ring sizes, backends and chunks, the input embedding in either place (``planner.space``), and
    two rules (``planner.pairs``) where that saves more than SIMPLER allows. ``emphasis``
    makes prefill and decode count so many times in what is least, for targets. The same
    input gives the same plan, byte for byte. Raises InfeasibleError, with the shortfall, when no
    candidate fits.
    """
    problem = Problem(model, machine, workload, _within(machine, budget))
    families, shortfall = list_families(problem)
    if not families:
        raise _infeasible(problem, shortfall)
    found = find_best(problem, families, Fastest(problem.weights, targets.limits_ps))
    assert found
    plan = Plan(
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
        offload=found.chosen.offload,
        prediction=predict(model, machine, workload, problem.budget, found.chosen.offload),
    )
    floor = find_floor(problem)
    return PlanResult(
        plan,
        _explain(plan, floor, found),
        found.num_candidates,
        found.num_priced,
        found.second_rule_gain,
        floor,
    )


def _within(machine: MachineProfile, budget: Budget) -> Budget:
    """Take no more than the machine has."""
    gpu = min(budget.gpu_memory, machine.gpu_memory.value)
    host = budget.host_memory
    if machine.host_memory is not None:
        limit = machine.host_memory.value
        host = limit if host is None else min(host, limit)
    return Budget(gpu_memory=gpu, host_memory=host)


def _infeasible(problem: Problem, shortfall: Shortfall) -> InfeasibleError:
    """Say what is missing and what would help."""
    budget = problem.budget
    if shortfall.gpu_bytes:
        lack = -(-shortfall.gpu_bytes * 1000 // round(1000 * (1 - MARGIN)))
        smallest = min(problem.settings, key=lambda setting: setting.lacking_bytes)
        fixed = problem.model.outside_bytes - smallest.host_bytes
        weights = problem.model.loaded_bytes - smallest.host_bytes
        taken = smallest.lacking_bytes + budget.gpu_memory - weights
        return InfeasibleError(
            f"no plan fits {format_bytes(budget.gpu_memory)} of GPU memory: "
            f"{format_bytes(lack)} more are needed. Of what lies outside the layers "
            f"{format_bytes(fixed)} are always on the GPU; KV cache, "
            f"activations and overhead take {format_bytes(taken)}. Give more GPU memory, or "
            f"shorten the context ({problem.workload.context} tokens) or the batch "
            f"({problem.workload.batch})",
            lack,
        )
    lack = shortfall.host_bytes or 0
    return InfeasibleError(
        f"no plan fits {format_bytes(budget.host_memory or 0)} of host memory: "
        f"{format_bytes(lack)} more are needed to hold what the GPU "
        f"({format_bytes(budget.gpu_memory)}) cannot. Give more of either",
        lack,
    )


def _explain_count(plan: Plan, found: Search) -> str:
    if len(plan.offload.rules) > 1:
        return f"the best plan of one rule takes {100 * (found.second_rule_gain - 1):.1f} % longer"
    return f"no second rule saves more than {100 * (SIMPLER - 1):.1f} %"


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
        f"plan keeps {format_bytes(prediction.host_memory_bytes)} on the host",
        f"{found.num_candidates} plans of one rule fit; {found.num_priced} of one rule and of two "
        "were priced, and bounds rule out the others",
        _explain_count(plan, found),
    ]
    if plan.offload.embeddings == "host":
        reasons.append(
            "of the input embedding only a row a token is read, so it lies on the host and leaves "
            "its place to layers; no engine's flag says that"
        )
    for name, phase in (("prefill", prediction.prefill), ("decode", prediction.decode)):
        hidden = "compute" if phase.compute_s >= phase.link_s else "the link"
        reasons.append(
            f"{name} is held by {hidden}: {format_seconds(phase.compute_s)} of compute, "
            f"{format_seconds(phase.link_s)} of link, {format_seconds(phase.step_s)} in all"
        )
    if any(rule.prefill is not rule.decode for rule in plan.offload.rules):
        reasons.append(
            f"a prompt copies {format_bytes(prediction.prefill.link_bytes)} by DMA; a decode step "
            f"reads only {format_bytes(prediction.decode.link_bytes)} of it, in place"
        )
    return tuple(reasons)
