"""Why a plan is the one, or why there is none: sentences for people."""

from collections.abc import Iterator

from offplan.costs.floor import Floor
from offplan.costs.memory import MARGIN, overhead_bytes
from offplan.errors import InfeasibleError
from offplan.plan import Backend, Plan, Prediction, Rule
from offplan.planner.search import Search
from offplan.planner.space import Space, find_room
from offplan.question import Question
from offplan.units import format_bytes, format_bytes_enough, format_seconds


def explain_plan(plan: Plan, floor: Floor, search: Search, max_rules: int) -> tuple[str, ...]:
    """Say why a plan is the best one."""
    goal = plan.goal
    reasons = [*_explain_offload(plan, floor, search, max_rules)]
    if goal.targets:
        reasons.append(f"of the plans that keep {goal.targets}, this is the fastest")
    if goal.engine:
        reasons.append(f"only plans that {goal.engine} can run were searched")
    return tuple(reasons)


def _explain_offload(plan: Plan, floor: Floor, search: Search, max_rules: int) -> Iterator[str]:
    memory, prediction = plan.prediction.gpu_memory, plan.prediction
    if not plan.offload.rules and plan.offload.embeddings == "device":
        yield (
            f"everything fits: {format_bytes(memory.total_bytes)} of "
            f"{format_bytes(plan.budget.gpu_memory)}, so nothing is offloaded"
        )
        return
    yield (
        f"at least {format_bytes(floor.missing_bytes)} of weights do not fit "
        f"{format_bytes(plan.budget.gpu_memory)} beside KV cache, activations and overhead; the "
        f"plan keeps {_describe_places(prediction)}"
    )
    yield (
        f"{search.num_candidates} plans of one rule fit; {search.num_priced} plans were priced, "
        "and bounds rule out the others"
    )
    if len(plan.offload.rules) > 1:
        yield f"the best plan of one rule takes {100 * (search.second_rule_gain - 1):.1f} % longer"
    if max_rules > 1:
        yield "no plan of up to two rules is faster"
    if plan.offload.embeddings == "host":
        yield (
            "of the input embedding only a row a token is read, so it lies on the host and leaves "
            "its place to layers; no engine's flag says that"
        )
    for name, phase in (("prefill", prediction.prefill), ("decode", prediction.decode)):
        bottleneck = "compute-bound" if phase.compute_s >= phase.link_s else "link-bound"
        # only what nobody in the pass waits for can be under way after its end
        ahead = " (the next step's copies included)" if phase.link_s > phase.step_s else ""
        yield (
            f"{name} is {bottleneck}: {format_seconds(phase.compute_s)} of compute, "
            f"{format_seconds(phase.link_s)} of link{ahead}, {format_seconds(phase.step_s)} in all"
        )
    yield from (_explain_backends(rule) for rule in plan.offload.rules if rule.is_mixed)


def _describe_places(prediction: Prediction) -> str:
    """Say how many bytes of weights lie where, off the GPU."""
    places = (("host", prediction.host_memory_bytes), ("peer", prediction.peer_memory_bytes))
    return " and ".join(f"{format_bytes(size)} on the {name}" for name, size in places if size)


def _explain_backends(rule: Rule) -> str:
    """Say why a rule has one backend for a prompt and another for a decode step."""
    what = " and ".join(rule.cpu_offload_params) or "all parameters of its layers"
    if rule.decode is Backend.UVA:
        return f"a prompt needs all of {what} and copies it; a decode step reads its part in place"
    return f"a decode step copies {what} ahead of its layers; a prompt reads it in place"


def explain_infeasible(space: Space, question: Question, search: Search) -> InfeasibleError:
    """Say what is missing and what would help."""
    budget, workload, model = question.budget, question.workload, question.model
    if question.goal.engine and not (search.gpu_lack or search.host_lack):
        return InfeasibleError(
            f"no plan that {question.goal.engine} can run fits "
            f"{format_bytes(budget.gpu_memory)}, though others do"
        )
    if search.gpu_lack:
        lack = -(-int(search.gpu_lack) * 1000 // round(1000 * (1 - MARGIN)))
        number = int(find_room(space, budget).lacking_bytes.argmin())
        smallest = space.settings[number]
        fixed = model.outside_bytes - smallest.host_bytes
        weights = model.loaded_bytes - smallest.host_bytes
        taken = smallest.device_bytes + overhead_bytes(space.machine, budget) - weights
        return InfeasibleError(
            f"no plan fits {format_bytes(budget.gpu_memory)} of GPU memory: "
            f"{format_bytes_enough(lack)} more are needed. Of what lies outside the layers "
            f"{format_bytes(fixed)} are always on the GPU; KV cache, "
            f"activations and overhead take {format_bytes(taken)}. Give more GPU memory, or "
            f"shorten the context ({workload.context} tokens) or the batch "
            f"({workload.batch})",
            lack,
        )
    lack = int(search.host_lack)  # that of plans of one rule: others may lack less
    return InfeasibleError(
        f"no plan fits {format_bytes(budget.host_memory or 0)} of {space.machine.store} memory: "
        f"up to {format_bytes_enough(lack)} more are needed to hold what the GPU "
        f"({format_bytes(budget.gpu_memory)}) cannot. Give more of either",
        lack,
    )
