"""A run: what the plan promised beside what was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.errors import Topic
from offplan.library.repricing import ComparedCounts
from offplan.plan import Plan, Prediction
from offplan.report.table import make_table
from offplan.units import format_bytes, format_seconds

if TYPE_CHECKING:  # they import torch
    from offplan.library.benchmark import BenchResult
    from offplan.report.bench_file import BenchFile
    from offplan.runtime.generate import Measured


@dataclass(frozen=True)
class RunResult:
    """The figures of one run, predicted and measured."""

    device: str
    """Name of the device it ran on: ``NVIDIA H200``, ``CPU``."""
    batch: int
    """Sequences that were generated together."""
    prompt_tokens: int
    """Tokens of each prompt; of the shortest in the last batch where they differ."""
    gpu_bytes: int | None
    """Bytes taken on the card at the peak; None on the CPU."""
    measured: "Measured"
    """Times and bytes over the link, of the prompt and of each further token."""
    prediction: Prediction | None = None
    """The plan's prediction for this batch and these prompts, if they are not its workload's."""
    counts: Mapping[str, ComparedCounts] = field(default_factory=dict)
    """Counts of steps by the capabilities that have some: experts found cached, and missed."""
    settled: Sequence[str] = ()
    """What was settled when the session opened: who multiplies missed experts. A sentence each."""


def render_run(plan: Plan, result: RunResult) -> RenderableType:
    """Show predicted against measured, and what keeps them from being comparable."""
    prediction, measured = plan.prediction, result.measured
    prefill, decode = prediction.prefill, prediction.decode
    table = make_table("Predicted and measured", "what", "predicted", "measured", "ratio")
    add = partial(add_comparison, table)
    add("time to first token", prefill.step_s, measured.first_token_s, format_seconds)
    add("time per token", decode.step_s, measured.median_step_s, format_seconds)
    add("GPU memory", prediction.gpu_memory.total_bytes, result.gpu_bytes, format_bytes)
    moved = None if reads_in_place(plan, "prefill") else measured.prefill_link_bytes
    add("over the link, prompt", prefill.link_bytes, moved, format_bytes)
    moved = None if reads_in_place(plan, "decode") else measured.step_link_bytes
    add("over the link, a token", decode.link_bytes, moved, format_bytes)
    add_counts(table, result.counts)
    lines = [*result.settled, *list_differences(plan, result)]
    if measured.drafts.num_passes or plan.offload.draft is not None:
        lines.append(f"{measured.drafts.describe()}.")
    if (other := result.prediction) is not None:
        ttft, tpot = format_seconds(other.prefill.step_s), format_seconds(other.decode.step_s)
        lines.append(f"For what ran it predicts {ttft} to the first token and {tpot} a token.")
    asked = (prediction if other is None else other).decode.step_s
    lines += note_cores(plan, result.device, asked, measured.median_step_s)
    return Group(table, Text(), *map(Text, lines))


SLOWER = 1.15
"""Times its prediction from which on a step of a plan with the host's cores is called slower.

Source: chosen; it is three times the error that predictions are asked to keep within.
"""


def note_cores(plan: Plan, device: str, predicted_s: float, measured_s: float | None) -> list[str]:
    """Say that a step by the host's cores takes longer than priced, and how to plan without them.

    Empty if no rule has the cores multiply, a step is not SLOWER, or the ``device`` that it ran
    on is not the plan's.
    """
    elsewhere = device != plan.machine.name
    if not plan.has_cores or elsewhere or (measured_s or 0.0) < SLOWER * predicted_s:
        return []
    return [
        f"With the host's cores a token takes {format_ratio(measured_s, predicted_s)} times what "
        "was predicted: other processes may use the cores, or they read more slowly than the "
        "profile has it. `offplan replan --no-host-cores PLAN` plans without them; offplan measure "
        f"-o writes a profile of what they read. See {Topic.SLOW.link}"
    ]


def add_counts(table: Table, counts: Mapping[str, ComparedCounts]) -> None:
    """Add what capabilities counted a token, beside what was predicted."""
    for each in counts.values():
        for name, of in each.counted.list_names():
            predicted, counted = getattr(each.predicted, of, None), getattr(each.counted, of)
            add_comparison(table, f"{name}, a token", predicted, counted, "{:.1f}".format)


def add_comparison(
    table: Table,
    name: str,
    predicted: float | None,
    measured: float | None,
    show: Callable[[float], str],
    *spread: float,
) -> None:
    """Add a row: a figure as predicted and as measured, their ratio, and the spread if any."""
    figures = ["-" if value is None else show(value) for value in (predicted, measured)]
    table.add_row(name, *figures, format_ratio(measured, predicted), *map(show, spread))


def format_ratio(value: float | None, base: float | None) -> str:
    """Print how many times ``base`` a value is: three decimals where a percent matters, else none.

    Prints a dash where one of them is not known, or there is nothing to compare with.
    """
    if value is None or not base:
        return "-"
    ratio = value / base
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"


def reads_in_place(plan: Plan, *phases: str) -> bool:
    """Return True if kernels read weights in place in one of the phases, which nobody counts."""
    backends = [getattr(rule, phase) for rule in plan.offload.rules for phase in phases]
    return any(not backend.streams and not backend.is_served for backend in backends)


def list_differences(plan: Plan, result: "RunResult | BenchResult | BenchFile") -> list[str]:
    """Say why a predicted figure may have no match among the measured ones."""
    workload, lines = plan.workload, []
    if plan.prediction.basis == "estimated":
        lines.append("Predicted with estimated times of the layers.")
    if result.device != plan.machine.name:
        lines.append(f"Predicted for {plan.machine.name}; ran on {result.device}.")
    if plan.goal.engine is not None:
        lines.append(
            f"Predicted as {plan.goal.engine} runs it, the plan's profile not being here; ran by "
            "offplan's own runtime: ratios of times say nothing."
        )
    if (workload.batch, workload.prompt_tokens) != (result.batch, result.prompt_tokens):
        lines.append(
            f"Predicted for batch {workload.batch} and a prompt of {workload.prompt_tokens}; ran "
            f"with batch {result.batch} and a prompt of {result.prompt_tokens}."
        )
    if reads_in_place(plan, "prefill", "decode"):
        lines.append("What kernels read in place over the link cannot be counted.")
    return lines
