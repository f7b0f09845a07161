"""Sources of a plan's numbers, costs of its neighbours, and why it is the one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offplan.costs.term import Input, Term, UnitName
from offplan.plan import Plan, Prediction, Rule
from offplan.planner.find import PlanResult, tokens_per_s
from offplan.planner.neighbours import Neighbour
from offplan.report.table import make_table
from offplan.stores import STORES
from offplan.units import (
    format_budget,
    format_bytes,
    format_flops,
    format_frequency,
    format_rate,
    format_seconds,
)

_SHOW: dict[UnitName, Callable[[float], str]] = {
    "bytes": format_bytes,
    "s": format_seconds,
    "bytes_per_s": format_rate,
    "flops_per_s": format_flops,
    "count": lambda value: f"{value:g}",
}
"""Printers of numbers, by unit."""


def render_explanation(
    plan: Plan, terms: Sequence[Term], neighbours: Sequence[Neighbour]
) -> list[RenderableType]:
    """Show each number with formula and inputs, where figures come from, and the neighbours."""
    derived = [part for term in terms for part in _render_term(term)]
    sources = dict.fromkeys(
        f"{each.name}: {each.source}" for term in terms for each in term.inputs if each.source
    )
    return [
        Group(*derived),
        Group(Text("Sources:"), *(_indent(line) for line in sources)),
        _render_neighbours(plan, neighbours),
    ]


def explanation_payload(terms: Sequence[Term], neighbours: Sequence[Neighbour]) -> dict[str, Any]:
    """Return the same as JSON, with plain numbers."""
    return {
        "terms": [{**vars(term), "inputs": [vars(each) for each in term.inputs]} for term in terms],
        "neighbours": [
            {
                "change": each.change,
                "refusal": each.refusal,
                "prediction": each.prediction.model_dump(mode="json"),
            }
            for each in neighbours
        ],
    }


def _render_term(term: Term) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{term.path}: {_SHOW[term.unit](term.value)} = {term.formula}")
    ]
    if [each.name for each in term.inputs] not in ([], [term.formula]):
        lines.append(_indent("; ".join(map(_name_input, term.inputs))))
    return lines


def _name_input(each: Input) -> str:
    return f"{each.name} {_SHOW[each.unit](each.value)}"


def _indent(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 4))


def _render_neighbours(plan: Plan, neighbours: Sequence[Neighbour]) -> Table:
    by = f", as {plan.goal.engine} runs it" if plan.goal.engine is not None else ""
    table = make_table(
        f"One step of each knob ({plan.prediction.basis}{by})",
        *("step", "request", "first token", "a token", "GPU memory"),
    )

    def add(name: str, each: Plan | Neighbour, request: str) -> None:
        table.add_row(
            name,
            request,
            format_seconds(each.prediction.prefill.step_s),
            format_seconds(each.prediction.decode.step_s),
            format_bytes(each.prediction.gpu_memory.total_bytes),
        )

    request_s = plan.prediction.objective_s
    add("this plan", plan, format_seconds(request_s))
    for each in neighbours:
        change = each.prediction.objective_s / request_s - 1 if request_s else 0
        lacks = f" (lacks {each.refusal})" if each.refusal else ""
        add(each.change + lacks, each, f"{change:+.1%}")
    return table


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
            "this one has the least product of first token and step, or hardly more and fewer rules"
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
        ahead = f"a decode step {step.verb} {what} ahead of its layers"
        return f"{ahead}; a prompt {prompt.verb} it{prompt.how}"
    return (
        f"a prompt needs all of {what} and {prompt.verb} it{prompt.how}; a decode step "
        f"{step.verb} its part{step.how}"
    )
