"""The picture of a plan's prediction beside the measured figures."""

from collections.abc import Callable

from offplan.report.bench_file import BenchFile
from offplan.report.pictures.canvas import Canvas
from offplan.report.run import format_ratio
from offplan.units import format_bytes, format_seconds


def draw_comparison(bench: BenchFile) -> Canvas:
    """Draw two bars for each figure that was predicted and measured."""
    canvas, sides = Canvas(), (bench.predicted, bench.measured)
    for phase, name in (("prefill", "First token"), ("decode", "A token")):
        steps, waits = (
            [getattr(getattr(side, phase), term) for side in sides]
            for term in ("step_s", "stall_s")
        )
        _draw_pair(canvas, name, steps, format_seconds, waits)
    for phase, name in (("prefill", "Over the link, prompt"), ("decode", "Over the link, a token")):
        _draw_pair(canvas, name, [getattr(side, phase).link_bytes for side in sides], format_bytes)
    _draw_pair(canvas, "GPU memory", [side.gpu_memory.total_bytes for side in sides], format_bytes)
    predicted, measured = (
        f"predicted ({bench.runtime.predicted})",
        f"measured ({bench.runtime.measured})",
    )
    canvas.legend(
        (("predicted", predicted), ("measured", measured), ("wait", "of it, waiting for the link"))
    )
    return canvas


def _draw_pair(
    canvas: Canvas,
    name: str,
    figures: list[float | None],
    show: Callable[[float], str],
    waits: list[float] | None = None,
) -> None:
    predicted, measured = figures
    if predicted is None or measured is None:
        return
    ratio = format_ratio(measured, predicted)
    canvas.text(name)
    canvas.text(f"{show(predicted)}, measured {show(measured)} (x {ratio})", "faint")
    most = max(predicted, measured) or 1.0
    for side, (colour, figure) in enumerate((("predicted", predicted), ("measured", measured))):
        parts = [(colour, 0.0, figure / most, show(figure))]
        if waits is not None:
            waited = min(waits[side], figure)
            hint = f"waiting for the link: {show(waited)}"
            parts.append(("wait", (figure - waited) / most, figure / most, hint))
        canvas.bar(parts, height=10)
    canvas.space()
