"""GPU memory against speed: a table, a plot, and JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.planner.find import tokens_per_s
from offplan.planner.frontier import Point, RamPoint
from offplan.report.strip import ShareBar
from offplan.report.table import make_table
from offplan.stores import STORES
from offplan.units import format_bytes, format_frequency, format_seconds

MOST_COLUMNS = 96
"""Columns of the longest bar, at most."""
_FIGURES_WIDTH = 24
"""Columns that stand beside a bar."""
_WHOLE = "tokens/s are of a whole request, its prompt included."


def render_frontier(points: Sequence[Point]) -> RenderableType:
    """Show what each budget gives, and what one more GiB of it would."""
    return Group(_render_table(points), Text(_WHOLE), Text(), _render_plot(points))


def _render_table(points: Sequence[Point]) -> Table:
    stores = points[0].plan.stores
    table = make_table(
        f"Frontier ({_basis(points)})",
        *("GPU memory", *(store.title for store in stores)),
        *("first token", "a token", "tokens/s", "1 GiB more saves"),
    )
    for point in points:
        prediction = point.plan.prediction
        saved = point.saved_per_gib_s
        table.add_row(
            format_bytes(point.plan.budget.gpu_memory),
            *(format_bytes(prediction.bytes_in(store)) for store in stores),
            format_seconds(prediction.prefill.step_s),
            format_seconds(prediction.decode.step_s),
            format_frequency(tokens_per_s(point.plan)),
            "-" if saved is None else format_seconds(saved),
        )
    return table


def render_ram_frontier(points: Sequence[RamPoint]) -> RenderableType:
    """Show what each memory of the machine gives, at the GPU memory that was asked for."""
    first = points[0].plan
    budget = format_bytes(first.budget.gpu_memory)
    table = make_table(
        f"RAM under Linux, with {budget} of GPU memory ({first.prediction.basis})",
        *("RAM", "page-locked", "first token", "a token", "tokens/s"),
    )
    for point in points:
        prediction = point.plan.prediction
        table.add_row(
            format_bytes(point.ram_bytes),
            format_bytes(prediction.host_memory_bytes),
            format_seconds(prediction.prefill.step_s),
            format_seconds(prediction.decode.step_s),
            format_frequency(tokens_per_s(point.plan)),
        )
    return Group(table, Text(f"Less does not fit, and more is no faster. {_WHOLE}"))


def ram_frontier_payload(points: Sequence[RamPoint]) -> list[dict[str, Any]]:
    """Return the points as JSON, the least memory first."""
    return [
        {
            "ram_bytes": point.ram_bytes,
            "host_memory_bytes": point.plan.prediction.host_memory_bytes,
            "prefill_s": point.plan.prediction.prefill.step_s,
            "decode_s": point.plan.prediction.decode.step_s,
            "tokens_per_s": tokens_per_s(point.plan),
        }
        for point in points
    ]


def _render_plot(points: Sequence[Point]) -> Table:
    """Draw a bar of tokens/s for each budget."""
    most = max(tokens_per_s(point.plan) for point in points)
    plot = Table.grid("", "", "", padding=(0, 1))
    plot.columns[0].justify = plot.columns[2].justify = "right"
    plot.title = Text(f"tokens/s by GPU memory, prompt included ({_basis(points)})")
    plot.title_style, plot.title_justify = "", "left"
    for point in points:
        rate = tokens_per_s(point.plan)
        budget = format_bytes(point.plan.budget.gpu_memory)
        bar = ShareBar(rate / most, MOST_COLUMNS, _FIGURES_WIDTH)
        plot.add_row(budget, bar, format_frequency(rate))
    return plot


def _basis(points: Sequence[Point]) -> str:
    """Return how the figures were obtained: all points are of one machine and workload."""
    return points[0].plan.prediction.basis


def frontier_payload(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as JSON, the smallest budget first."""
    return [
        {
            "gpu_memory": point.plan.budget.gpu_memory,
            "basis": point.plan.prediction.basis,
            **{s.bytes_key: point.plan.prediction.bytes_in(s) for s in STORES.values()},
            "objective_s": point.plan.prediction.objective_s,
            "prefill_s": point.plan.prediction.prefill.step_s,
            "decode_s": point.plan.prediction.decode.step_s,
            "tokens_per_s": tokens_per_s(point.plan),
            "saved_per_gib_s": point.saved_per_gib_s,
            "offload": point.plan.offload.model_dump(mode="json"),
        }
        for point in points
    ]
