"""The whole report of ``analyze``: the model, the machine, the plan or why there is none."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from offplan.checkpoint.model import Model
from offplan.costs.crossovers import Crossovers
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.planner.make import PlanResult
from offplan.report.machine import render_machine
from offplan.report.model import render_model
from offplan.report.plan import render_plan


@dataclass(frozen=True)
class Analysis:
    """What ``analyze`` found: a result, why there is none, or what could not be measured."""

    model: Model
    machine: MachineProfile | None
    result: PlanResult | None = None
    crossovers: Crossovers | None = None
    """Of the result."""
    infeasible: InfeasibleError | None = None
    unmeasured: str | None = None
    """What could not be measured, so that nothing was planned."""


def render_analysis(analysis: Analysis) -> Iterator[RenderableType]:
    """Show everything, part by part."""
    yield render_model(analysis.model)
    if analysis.machine is not None:
        yield render_machine(analysis.machine)
    if analysis.result is not None and analysis.crossovers is not None:
        yield render_plan(analysis.result, analysis.crossovers)
    if analysis.infeasible is not None:
        yield Text(f"Infeasible: {analysis.infeasible}")
    if analysis.unmeasured is not None:
        yield Text(f"Not planned: {analysis.unmeasured}")
