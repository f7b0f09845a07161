"""Machines for a model, and models for a machine: a table, and the same as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.checkpoint.popular import Checkpoint
from offplan.library.rankings import Ranked
from offplan.plan import Workload
from offplan.report.answer import describe_workload, print_speed
from offplan.report.table import Paragraph, make_table
from offplan.units import format_about_seconds, format_budget, format_bytes

_ASSUMED = (
    "Times are estimates from the figures of profiles. RAM is the memory that a machine with Linux "
    "needs for the plan. `no`: no plan fits. `*`: `offplan run` does not run there."
)


def render_ranked_machines(
    found: Sequence[Ranked], source: str, workload: Workload
) -> RenderableType:
    """Show machines by tokens a second of a model, with what each holds of it off the GPU."""
    headings = ("--machine", "GPU", "tokens/s", "first token", "on host", "RAM")
    table = make_table(f"{source}, {format_bytes(found[0].model_bytes)}, by machine", *headings)
    for each in found:
        told = ("-", "-")
        if each.plan is not None:
            host = each.plan.prediction.host_memory_bytes
            first = format_about_seconds(each.plan.prediction.prefill.step_s)
            told = (first, f"{-(-host // 2**30)} GiB" if host else "-")
        memory = format_budget(each.gpu_bytes)
        table.add_row(each.name, memory, _show_rate(each), *told, _show_ram(each))
    return _finish(table, workload)


def render_ranked_models(found: Sequence[Ranked], name: str, workload: Workload) -> RenderableType:
    """Show models by tokens a second on a machine."""
    memory = format_budget(found[0].gpu_bytes)
    title = f"Popular checkpoints on {name}, {memory}"
    table = make_table(title, "MODEL", "GiB, form", "tokens/s", "RAM")
    for each in found:
        size = f"{each.model_bytes / 2**30:.0f} {each.form}"
        table.add_row(each.name, size, _show_rate(each), _show_ram(each))
    return _finish(
        table,
        workload,
        "Repositories of the same models in 8 or 4 bits are smaller and faster: `offplan analyze "
        "MODEL` says what they would give.",
    )


def render_checkpoints(listed: Sequence[Checkpoint]) -> RenderableType:
    """List checkpoints, the smallest one first."""
    table = make_table("Popular checkpoints", "MODEL", "as stored", "form", "facts of")
    for each in listed:
        table.add_row(each.name, format_bytes(each.num_bytes), each.form, each.date)
    return table


def checkpoints_payload(listed: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """Return the checkpoints as JSON, the smallest one first."""
    return [
        {"name": c.name, "form": c.form, "total_bytes": c.num_bytes, "date": c.date} for c in listed
    ]


def _finish(table: Table, workload: Workload, *more: str) -> Group:
    table.columns[0].no_wrap = True
    told = (describe_workload(workload), _ASSUMED, *more)
    return Group(table, Text(), *map(Paragraph, told))


def _show_rate(ranked: Ranked) -> str:
    if ranked.plan is None:
        return "no"
    return print_speed(ranked.plan).rate + "*" * (ranked.why_not is not None)


def _show_ram(ranked: Ranked) -> str:
    if ranked.plan is not None and not ranked.plan.prediction.host_memory_bytes:
        return "any"
    return "-" if ranked.ram_bytes is None else format_budget(ranked.ram_bytes)


def rankings_payload(found: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the rows as JSON, the fastest first; times are null if no plan fits."""
    return [
        {
            "name": each.name,
            "form": each.form,
            "gpu_memory": each.gpu_bytes,
            "total_bytes": each.model_bytes,
            "tokens_per_s": None if each.plan is None else each.rate,
            "first_token_s": None if each.plan is None else each.plan.prediction.prefill.step_s,
            "gpu_memory_bytes": None
            if each.plan is None
            else each.plan.prediction.gpu_memory.total_bytes,
            "host_memory_bytes": None
            if each.plan is None
            else each.plan.prediction.host_memory_bytes,
            "ram_bytes": each.ram_bytes,
            "basis": None if each.plan is None else each.plan.prediction.basis,
            "why_not": each.why_not,
        }
        for each in found
    ]
