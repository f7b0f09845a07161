"""Sources of a plan's numbers, and costs of its neighbours."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offplan.costs.term import Input, Term, UnitName
from offplan.plan import Plan
from offplan.planner.neighbours import Neighbour
from offplan.report.table import make_table
from offplan.units import format_bytes, format_flops, format_rate, format_seconds

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
