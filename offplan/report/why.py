"""Why a plan is the one: sentences for people."""

from collections.abc import Iterator

from offplan.plan import Prediction, Rule
from offplan.planner.find import PlanResult
from offplan.planner.throughput import tokens_per_s
from offplan.stores import STORES
from offplan.units import format_budget, format_bytes, format_frequency, format_seconds


def explain_plan(result: PlanResult) -> list[str]:
    """Say why a plan is the best one, in sentences."""
    plan, goal = result.plan, result.plan.goal
    reasons = [*_explain_offload(result)]
    if goal.targets:
        reasons.append(f"of the plans that keep {goal.targets}, this is the fastest")
    if goal.engine:
        reasons.append(f"only plans that {goal.engine} can run were searched")
    if goal.objective == "throughput":
        speed = f"{format_frequency(tokens_per_s(plan))} tokens/s"
        reasons.append(f"batch {plan.workload.batch} gives most of those tried: {speed}")
    return reasons


def _explain_offload(result: PlanResult) -> Iterator[str]:
    plan, prediction = result.plan, result.plan.prediction
    memory, recoding = prediction.gpu_memory, plan.offload.recoding
    if not plan.offload.rules and plan.offload.embeddings == "device":
        recoded = "" if recoding is None else f" with weights {recoding.done}"
        yield (
            f"everything fits{recoded}: {format_bytes(memory.total_bytes)} of "
            f"{format_budget(plan.budget.gpu_memory)}, so nothing is offloaded"
        )
        return
    yield (
        f"at least {format_bytes(result.floor.missing_bytes)} of weights do not fit "
        f"{format_budget(plan.budget.gpu_memory)} beside KV cache, activations and overhead; the "
        f"plan keeps {_describe_places(prediction)}"
    )
    yield (
        f"{result.num_candidates} plans of one rule fit; {result.num_priced} plans were priced, "
        "and no estimate of another is better"
    )
    if recoding is not None:
        yield recoding.gain
    if result.second_rule_gain > 1:
        yield f"the best plan of one rule takes {100 * (result.second_rule_gain - 1):.1f} % longer"
    if (longer := prediction.objective_s / result.best_s - 1) >= 0.0005:
        yield (
            f"the fastest plan found takes {100 * longer:.1f} % less; of the plans within 1 % "
            "this one has the earliest first token, or the fewest rules of those that have"
        )
    elif result.max_rules > 1:
        yield "no faster plan of up to two rules was found"
    if plan.offload.embeddings == "host":
        yield (
            "of embeddings that no head is tied to, such as an input embedding, a pass reads a few "
            "rows a token, so they lie on the host and leave their place to layers; no engine's "
            "flag says that"
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
    places = ((store.name, prediction.bytes_in(store)) for store in STORES.values())
    return " and ".join(f"{format_bytes(size)} on the {name}" for name, size in places if size)


def _explain_backends(rule: Rule) -> str:
    """Say why a rule has one backend for a prompt and another for a decode step."""
    what = " and ".join(rule.cpu_offload_params) or "all parameters of its layers"
    prompt, step = rule.prefill.words, rule.decode.words
    if rule.decode.streams:
        ahead = f"a decode step {step.verb[1]} {what} ahead of its layers"
        return f"{ahead}; a prompt {prompt.verb[1]} it{prompt.how}"
    return (
        f"a prompt needs all of {what} and {prompt.verb[1]} it{prompt.how}; a decode step "
        f"{step.verb[1]} its part{step.how}"
    )
