"""The plan: what stays on the host and what that is predicted to cost."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offplan.capabilities.drafts import PASS_TOKENS
from offplan.costs.floor import Floor
from offplan.plan import Plan, Rule
from offplan.planner.find import PlanResult
from offplan.report.explain import explain_plan
from offplan.report.strip import memory_parts
from offplan.report.table import make_table
from offplan.stores import STORES
from offplan.units import (
    format_budget,
    format_bytes,
    format_frequency,
    format_rate,
    format_seconds,
)


def render_plan(result: PlanResult) -> list[RenderableType]:
    """Show the rules, why they were chosen, the memory terms and the prediction."""
    plan = result.plan
    why = f"Why ({plan.prediction.basis})"
    decision = _render_list("Plan", describe_offload(plan))
    reasons = _render_list(why, explain_plan(result))
    tables = [_render_memory(plan), _render_prediction(plan, result.floor)]
    speed = Text(describe_request(plan))
    return [Group(*decision, *reasons), *tables, Group(speed, Text(describe_gap(result)))]


def render_plan_file(plan: Plan) -> list[RenderableType]:
    """Show what a plan's file says, without its model or its machine."""
    asked = _render_list("Asked", describe_question(plan))
    decision = _render_list("Plan", describe_offload(plan))
    tables = [_render_memory(plan), _render_prediction(plan)]
    held = Text("The file says so; `offplan check` reports whether it still holds.")
    return [Group(*asked, *decision), *tables, Group(Text(describe_request(plan)), held)]


def describe_question(plan: Plan) -> list[str]:
    """Say what a plan answers, in lines."""
    model, machine, budget, goal = plan.model, plan.machine, plan.budget, plan.goal
    revision = f" at {model.revision[:12]}" if model.revision else ""
    limit = "unlimited" if budget.host_memory is None else format_budget(budget.host_memory)
    what = {"latency": "the least time of a request", "throughput": "the most tokens a second"}
    return [
        f"{model.source}{revision}, {model.dtype}",
        f"{machine.name}, {machine.link}: {format_rate(machine.h2d)} ({machine.basis})",
        "batch {batch}, {prompt_tokens} prompt tokens, {output_tokens} output tokens, context "
        "{context}".format(**plan.workload.model_dump()),
        f"{format_budget(budget.gpu_memory)} of GPU memory, "
        f"{STORES[plan.offload.store].title} memory {limit}",
        *goal.describe(),
        *([f"experts are chosen again as {plan.routing.file} has it"] if plan.routing else []),
        *([f"drafts are taken as {plan.acceptance.file} has it"] if plan.acceptance else []),
        what[goal.objective]
        + (f" with {goal.targets}" if goal.targets else "")
        + (f", as {goal.engine} can run it" if goal.engine else "")
        + ("" if goal.way.is_own else f", by {goal.way.whose} passes")
        + (f" on {goal.gpus}" if goal.num_gpus > 1 else ""),
    ]


def describe_request(plan: Plan) -> str:
    """Say how long a request takes, in a line."""
    estimated = plan.prediction.basis == "estimated"
    request_s = format_seconds(plan.prediction.objective_s)
    speed = ""
    if step_s := plan.prediction.decode.step_s:  # a file may say anything
        speed = f": {format_frequency(plan.workload.batch / step_s)} tokens/s in decode"
    return f"A request takes {request_s}{', estimated' * estimated}{speed}."


def describe_gap(result: PlanResult) -> str:
    """Say how far the plan is from what physics allows, in a line."""
    prediction, floor_s = result.plan.prediction, result.floor.objective_s
    num_steps = result.plan.workload.num_steps
    bound_s = prediction.prefill.bound_s + num_steps * prediction.decode.bound_s
    return (
        f"Bound of its bytes {format_seconds(bound_s)} (x{prediction.objective_s / bound_s:.3f}); "
        f"floor of any plan {format_seconds(floor_s)} (x{result.gap:.3f})"
        f"{'; all estimated' * (prediction.basis == 'estimated')}."
    )


def describe_offload(plan: Plan) -> list[str]:
    """Say the decision in words, a line for each rule."""
    offload = plan.offload
    lines = [_describe_rule(rule, STORES[offload.store].title) for rule in offload.rules]
    if offload.embeddings == "host":
        lines.append("on the host: embeddings, read by row")
    if not lines:
        lines.append("everything fits the GPU; nothing is offloaded")
    if offload.recoding is not None:
        lines.append(offload.recoding.describe())
    if any(any(rule.streams) for rule in offload.rules):
        lines.append(f"slots in the ring (prefetch_step): {offload.prefetch_step}")
    if offload.draft is not None:
        lines.append(offload.draft.describe())
    return [*lines, f"prompts are read in chunks of {offload.prefill_chunk} tokens"]


def _render_list(title: str, lines: Sequence[str]) -> list[RenderableType]:
    return [Text(f"{title}:"), *(Padding(Text(line), (0, 0, 0, 2)) for line in lines)]


def _describe_rule(rule: Rule, store: str) -> str:
    what = ", ".join(rule.cpu_offload_params) or "all parameters"
    if rule.max_bytes is not None:
        where = f"from layer 0 on, up to {format_bytes(rule.max_bytes)}"
    else:
        where = rule.where
    how = f"prefill {rule.prefill.name}, decode {rule.decode.name}"
    return f"on the {store}: {what} {where} ({how}){rule.describe()}"


def _render_memory(plan: Plan) -> Table:
    memory = plan.prediction.gpu_memory
    table = make_table("Memory", "term", "bytes")
    for name, num_bytes in memory_parts(memory):
        table.add_row(name, format_bytes(num_bytes))
    budget = format_budget(plan.budget.gpu_memory)
    table.add_row(f"GPU, of {budget}", format_bytes(memory.total_bytes))
    for store in plan.stores:
        table.add_row(store.title, format_bytes(plan.prediction.bytes_in(store)))
    return table


def _render_prediction(plan: Plan, floor: Floor | None = None) -> Table:
    prefill, decode = plan.prediction.prefill, plan.prediction.decode
    table = make_table(
        f"Prediction ({plan.prediction.basis})",
        *("figure", f"prefill of {plan.workload.prompt_tokens}", "decode, a token"),
    )
    for name in ("step", "compute", "link", "stall", "bound"):
        seconds = [getattr(phase, f"{name}_s") for phase in (prefill, decode)]
        table.add_row(name, *map(format_seconds, seconds))
    if floor is not None:
        table.add_row("floor", format_seconds(floor.prefill_s), format_seconds(floor.decode_s))
    crossing = map(format_bytes, (prefill.link_bytes, decode.link_bytes))
    table.add_row("over the link", *crossing)
    for name, value in describe_passes(plan):
        table.add_row(name, "", value)
    return table


def describe_passes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what passes that check drafts take, and how many tokens they give; nothing without."""
    drafts = plan.prediction.draft
    if drafts is None:
        return
    yield "tokens a pass", f"{drafts.tokens:.2f}"
    yield "a step without drafts", format_seconds(drafts.step_s)
    for size in PASS_TOKENS:
        seconds = getattr(drafts, f"pass_{size}_s")
        if seconds is not None:
            yield f"a pass of {size} tokens", format_seconds(seconds)
