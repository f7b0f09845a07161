"""The whole report of ``analyze``: the model, the machine, the plan or why there is none."""

from rich.console import RenderableType

from offplan.capabilities.way import Way
from offplan.checkpoint.model import Model
from offplan.library.analysis import Analysis
from offplan.report.machine import render_machine
from offplan.report.model import render_model
from offplan.report.plan import render_plan
from offplan.report.shares import render_shares
from offplan.report.wording import name_options
from offplan.units import format_bytes


def describe_running(model: Model, why_not: str | None, way: Way) -> str:
    """Say in a line whether ``run`` can execute a model, or the text part of it, and which way."""
    if why_not is not None:
        return f"Plans only: {name_options(why_not)}"
    if not way.is_own:
        return f"`offplan run` can execute this model, by {way.whose} passes."
    if not model.towers:
        return "`offplan run` can execute this model."
    left = format_bytes(model.tower_bytes)
    return (
        "`offplan run` executes the text part alone; what reads images or sound "
        f"({left}) stays unloaded."
    )


def render_analysis(analysis: Analysis) -> list[RenderableType]:
    """Show all that a plan rests on, part by part: the model, the machine, reasons and terms."""
    parts = render_model(analysis.model)
    if analysis.machine is not None:
        parts.append(render_machine(analysis.machine))
    if analysis.result is not None:
        parts += render_plan(analysis.result)
        if analysis.shares:
            parts.append(render_shares(analysis.shares))
    return parts
