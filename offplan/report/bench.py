"""A benchmark of a plan: what was measured beside the prediction, the bound and other ways."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.plan import PhasePrediction, Plan
from offplan.report.run import (
    add_comparison,
    add_counts,
    format_ratio,
    list_differences,
    note_cores,
    reads_in_place,
)
from offplan.report.table import make_table
from offplan.report.wording import name_options
from offplan.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:  # they import torch
    from offplan.library.benchmark import BenchResult
    from offplan.runtime.measuring.bench import Measurement, PhaseCost, Spread

PHASES = {"decode": "Decode, a step", "prefill": "Prefill, the prompt"}
"""The phases as keys and as people read them."""
MOST_STALLED = 8
"""Layers that the report names; JSON has them all."""


@dataclass(frozen=True)
class MeasuredPhase:
    """One phase of the plan as it was measured (decode: one step; prefill: the whole prompt)."""

    step: "Spread"
    link_bytes: int | None
    """Bytes that crossed the link; None if kernels read weights in place, which nobody counts."""
    stall_s: float
    """Seconds that compute waited for the link."""
    bound_s: float | None
    """Seconds: max(compute, bytes over the link's measured rate); None if the bytes are."""
    compute_s: float
    """Seconds with everything resident: measured if that ran too, else as predicted."""


def measured_phase(plan: Plan, result: "BenchResult", phase: str) -> MeasuredPhase:
    """Bring the measurements of a phase (``decode`` or ``prefill``) together."""
    cost: PhaseCost = getattr(result.plan, phase)
    resident = result.others.get("resident", "")
    predicted: PhasePrediction = getattr(plan.prediction, phase)
    compute_s = predicted.compute_s
    if not isinstance(resident, str):
        compute_s = getattr(resident, phase).step.median_s
    link_bytes = None if reads_in_place(plan, phase) else cost.link_bytes
    rate = result.plan.link_bytes_per_s
    link_s = link_bytes / rate if link_bytes and rate else 0.0
    bound_s = None if link_bytes is None else max(compute_s, link_s)
    stall_s = sum((cost.stalls_s or {}).values())
    return MeasuredPhase(cost.step, link_bytes, stall_s, bound_s, compute_s)


def render_bench(plan: Plan, result: "BenchResult") -> list[RenderableType]:
    """Show everything, for people."""
    tables = [_render_phase(plan, result, phase) for phase in PHASES]
    parts: list[RenderableType] = [*tables, _render_machine(plan, result)]
    if stalls := _render_stalls(result.plan):
        parts.append(stalls)
    if result.others:
        parts.append(_render_others(result))
    return [*parts, Group(*map(Text, _notes(plan, result)))]


def _render_phase(plan: Plan, result: "BenchResult", phase: str) -> Table:
    predicted: PhasePrediction = getattr(plan.prediction, phase)
    found = measured_phase(plan, result, phase)
    table = make_table(PHASES[phase], "what", "predicted", "measured", "ratio", "min", "max")
    add = partial(add_comparison, table)
    step, is_step = found.step, phase == "decode"
    drafted = plan.prediction.draft if is_step else None
    of_step: list[Any] = [predicted.bound_s, predicted.stall_s, predicted.link_bytes]
    over = format_ratio(predicted.step_s, predicted.bound_s)
    if drafted is not None:  # those of a token are the means of all passes
        of_step, over = [None, None, None], "-"
    measured = format_seconds, step.min_s, step.max_s
    if is_step and result.plan.drafts is not None:
        step_s = None if drafted is None else drafted.step_s
        add("a token, with drafts", predicted.step_s, result.plan.drafted_s, format_seconds)
        add("a step without drafts", step_s, step.median_s, *measured)
    else:
        add("time", predicted.step_s, step.median_s, *measured)
    add("bound", of_step[0], found.bound_s, format_seconds)
    add("waiting for the link", of_step[1], found.stall_s, format_seconds)
    add("over the link", of_step[2], found.link_bytes, format_bytes)
    if is_step:
        add_counts(table, result.counts)
    table.add_row("time / bound", over, format_ratio(step.median_s, found.bound_s))
    return table


def _render_machine(plan: Plan, result: "BenchResult") -> Table:
    table = make_table("Link and memory", "what", "predicted", "measured", "ratio")
    add = partial(add_comparison, table)
    decode = measured_phase(plan, result, "decode")
    add("link, copies alone", plan.machine.h2d, result.plan.link_bytes_per_s, format_rate)
    if decode.link_bytes:
        add("link, in decode", None, decode.link_bytes / decode.step.median_s, format_rate)
    memory = plan.prediction.gpu_memory
    add("GPU memory", memory.total_bytes, result.plan.gpu_bytes, format_bytes)
    # without a ratio: the prediction counts the weights, the measurement all of the process
    predicted = format_bytes(plan.prediction.host_memory_bytes)
    table.add_row("host memory", predicted, format_bytes(result.host_bytes), "-")
    return table


def _render_stalls(cost: "Measurement") -> Table | None:
    """Show the layers that compute waited for the longest; None if it never did."""
    decode, prefill = cost.decode.stalls_s or {}, cost.prefill.stalls_s or {}
    layers = sorted(
        decode.keys() | prefill.keys(),
        key=lambda layer: (-decode.get(layer, 0.0) - prefill.get(layer, 0.0), layer),
    )
    if not layers:
        return None
    table = make_table("Stalls by layer", "layer", "decode", "prefill")

    def add(name: str, some: list[int]) -> None:
        waits = (sum(phase.get(layer, 0.0) for layer in some) for phase in (decode, prefill))
        table.add_row(name, *map(format_seconds, waits))

    for layer in layers[:MOST_STALLED]:
        add(str(layer), [layer])
    if rest := layers[MOST_STALLED:]:
        add(f"{len(rest)} others", rest)
    return table


def _render_others(result: "BenchResult") -> Table:
    table = make_table(
        "Side by side", "way", "decode step", "x plan", "prefill", "x plan", "GPU memory"
    )
    plan = result.plan
    for name, way in {"plan": result.plan, **result.others}.items():
        if isinstance(way, str):
            table.add_row(name, *["-"] * 5)
            continue
        decode, prefill = way.decode.step.median_s, way.prefill.step.median_s
        table.add_row(
            name,
            format_seconds(decode),
            format_ratio(decode, plan.decode.step.median_s),
            format_seconds(prefill),
            format_ratio(prefill, plan.prefill.step.median_s),
            "-" if way.gpu_bytes is None else format_bytes(way.gpu_bytes),
        )
    return table


def _notes(plan: Plan, result: "BenchResult") -> list[str]:
    """Say how the figures were obtained, and what keeps them from being comparable."""
    measured = not isinstance(result.others.get("resident", ""), str)
    drafted = plan.prediction.draft
    predicted_s = plan.prediction.decode.step_s if drafted is None else drafted.step_s
    compute = "measured with everything resident" if measured else "as predicted"
    return [
        f"{result.device}, batch {result.batch}, {result.prompt_tokens} prompt tokens: medians of "
        f"{result.num_repeats} prompts and {result.num_repeats * result.num_steps} decode steps, "
        "warm-up excluded.",
        f"Bound: the larger of compute ({compute}) and bytes over the link's own rate.",
        "Host memory: predicted for the weights, measured for the whole process.",
        *result.plan.notes,
        *([f"{drafts.describe()}."] if (drafts := result.plan.drafts) is not None else []),
        *list_differences(plan, result),
        *note_cores(plan, result.device, predicted_s, result.plan.decode.step.median_s),
        *_notes_on_accelerate(plan, result),
        *(
            f"{name}: {name_options(way) if isinstance(way, str) else way.told}"
            for name, way in result.others.items()
            if isinstance(way, str) or way.told
        ),
    ]


def _notes_on_accelerate(plan: Plan, result: "BenchResult") -> list[str]:
    recoding = plan.offload.recoding
    if recoding is None or isinstance(result.others.get("accelerate", ""), str):
        return []
    return [
        "accelerate has what the plan offloads on the host and holds every weight as it is stored, "
        "which takes more GPU memory than the plan: a plan made with "
        f"{name_options(recoding.without)} compares them in the same."
    ]
