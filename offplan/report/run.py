"""A run: what the plan promised beside what was measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from offplan.plan import Backend, Plan
from offplan.report.table import make_table
from offplan.units import format_bytes, format_seconds

if TYPE_CHECKING:  # they import torch
    import torch

    from offplan.runtime.generate import Measured
    from offplan.runtime.session import Session

Show = Callable[[float], str]


@dataclass(frozen=True)
class RunResult:
    """What one run did and cost."""

    device: str
    """What it ran on, as people call it: ``NVIDIA H200``, ``CPU``."""
    batch: int
    """Sequences that were generated together."""
    prompt_tokens: int
    """Tokens of each prompt."""
    output_tokens: int
    """Tokens of each sequence that were generated."""
    first_token_s: float
    """Seconds from the prompt to the first token on the host."""
    step_s: float | None
    """Median seconds of a further token; None if there was only one."""
    prefill_link_bytes: int
    """Bytes that crossed the link for the prompt, as ``Session.link_bytes`` counts them."""
    decode_link_bytes: int | None
    """Bytes that crossed it in a decode step, on average; None if there was only one token."""
    gpu_bytes: int | None
    """Bytes taken on the card at the peak; None on the CPU."""


def collect_result(session: "Session", prompt: "torch.Tensor", measured: "Measured") -> RunResult:
    """Collect what ``generate`` did with a prompt (int64, [batch, tokens]) and what it cost."""
    from offplan.runtime.device import device_name

    batch, prompt_tokens = prompt.shape
    return RunResult(
        device=device_name(session.device),
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=len(measured.step_s) + 1,
        first_token_s=measured.first_token_s,
        step_s=measured.median_step_s if measured.step_s else None,
        prefill_link_bytes=measured.prefill_link_bytes,
        decode_link_bytes=measured.step_link_bytes,
        gpu_bytes=session.gpu_bytes if session.device.type == "cuda" else None,
    )


def render_run(plan: Plan, result: RunResult) -> RenderableType:
    """Show predicted against measured, and what keeps them from being comparable."""
    prediction = plan.prediction
    table = make_table("Predicted and measured", "what", "predicted", "measured", "ratio")

    def add(name: str, predicted: float, measured: float | None, show: Show) -> None:
        found = "-" if measured is None else show(measured)
        ratio = None if measured is None or not predicted else measured / predicted
        table.add_row(name, show(predicted), found, format_ratio(ratio))

    add("time to first token", prediction.prefill.step_s, result.first_token_s, format_seconds)
    add("time per token", prediction.decode.step_s, result.step_s, format_seconds)
    add("GPU memory", prediction.gpu_memory.total_bytes, result.gpu_bytes, format_bytes)
    for name, phase, moved in (
        ("over the link, prompt", "prefill", result.prefill_link_bytes),
        ("over the link, a token", "decode", result.decode_link_bytes),
    ):
        in_place = any(getattr(rule, phase) is Backend.UVA for rule in plan.offload.rules)
        predicted = getattr(prediction, phase).link_bytes
        add(name, predicted, None if in_place else moved, format_bytes)
    return Group(table, Text(), *map(Text, _differences(plan, result)))


def format_ratio(ratio: float | None) -> str:
    """Print measured over predicted: three decimals where a percent matters, none where not."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"


def describe_basis(plan: Plan) -> list[str]:
    """Say where a prediction rests on estimates; nothing where it was measured."""
    estimated = plan.prediction.basis == "estimated"
    return ["Predicted with estimated times of the layers."] * estimated


def _differences(plan: Plan, result: RunResult) -> list[str]:
    """Say why a figure on the left may have no match on the right."""
    workload, lines = plan.workload, describe_basis(plan)
    if result.device != plan.machine.name:
        lines.append(f"Predicted for {plan.machine.name}; ran on {result.device}.")
    if (workload.batch, workload.prompt_tokens) != (result.batch, result.prompt_tokens):
        lines.append(
            f"Predicted for batch {workload.batch} and {workload.prompt_tokens} prompt tokens; "
            f"ran with {result.batch} and {result.prompt_tokens}."
        )
    rules = plan.offload.rules
    if any(Backend.UVA in (rule.prefill, rule.decode) for rule in rules):
        lines.append("What kernels read in place over the link cannot be counted.")
    return lines
