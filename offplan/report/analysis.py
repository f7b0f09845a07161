"""The whole report of ``analyze``: the model, the machine, the plan or why there is none."""

from dataclasses import dataclass
from functools import cached_property

from rich.console import RenderableType

from offplan.checkpoint.model import Model
from offplan.costs.crossovers import Crossovers, find_crossovers
from offplan.errors import InfeasibleError, PlanError
from offplan.held.held import Held, hold
from offplan.library.runnable import why_not_run
from offplan.machine.profile import MachineProfile
from offplan.packing_sample import find_unpackable
from offplan.plan import Plan
from offplan.planner.find import PlanResult
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.rereads import Rereads, find_rereads
from offplan.planner.sooner import find_sooner
from offplan.planner.unused import Unused, find_unused
from offplan.report.machine import render_machine
from offplan.report.model import render_model
from offplan.report.plan import render_plan
from offplan.report.ranks import list_shares, render_shares
from offplan.units import format_bytes


@dataclass(frozen=True)
class Analysis:
    """What ``analyze`` found: a result, why there is none, or what could not be measured."""

    held: Held
    """What the ranks hold of the model, nothing of it packed."""
    why_not_run: str | None
    """Why ``run`` cannot execute the model; None where it can."""
    machine: MachineProfile | None
    """The machine's figures; None where there was nothing to measure."""
    result: PlanResult | None = None
    """The plan and its reasons; None where there is none."""
    sooner: Plan | None = None
    """A plan whose first token comes much sooner, for hardly more time in all; None without."""
    rereads: Rereads | None = None
    """A prompt that reads weights again and again; None where it does not."""
    unused: Unused | None = None
    """Memory that stays unused though the plan offloads; None for a few per cent of the budget."""
    infeasible: InfeasibleError | None = None
    """Why no plan fits; None where one does."""
    unmeasured: str | None = None
    """What could not be measured, so that nothing was planned; None where all was."""

    @cached_property
    def unpackable(self) -> tuple[str, ...]:
        """Weights that the plan packs and that a sample of local files shows not to pack."""
        if self.result is None:
            return ()
        return find_unpackable(self.held.model, self.result.plan.offload.packing)

    @cached_property
    def crossovers(self) -> Crossovers | None:
        """Where the plan's bottleneck changes, found when asked for; None without a plan."""
        if self.result is None or self.machine is None:
            return None
        plan = self.result.plan
        linked = self.machine.with_link(plan.offload.store, plan.goal.ranks)
        return find_crossovers(self.held.pack(plan.offload.packing), linked, plan)


def analyze_question(question: Question) -> Analysis:
    """Plan for a question; that no plan fits is a finding like another."""
    try:
        return analyze_result(question, make_plan(question))
    except InfeasibleError as error:
        why_not = why_not_run(hold(question.model), question.workload.context)
        return Analysis(question.held, why_not, question.machine, infeasible=error)


def analyze_result(question: Question, result: PlanResult) -> Analysis:
    """Look at the plan that answers a question."""
    plan = result.plan
    return Analysis(
        question.held,
        why_not_plan(question.model, plan),
        question.machine,
        result,
        find_sooner(question, result),
        find_rereads(question, plan),
        find_unused(question, plan),
    )


def why_not_plan(model: Model, plan: Plan) -> str | None:
    """Return why ``run`` cannot execute a model by a plan, None where it can."""
    try:
        plan.require_one_gpu()
    except PlanError as error:
        return str(error)
    return why_not_run(hold(model, plan.offload.packing), plan.workload.context)


def describe_running(model: Model, why_not: str | None) -> str:
    """Say in a line whether ``run`` can execute a model, or the text part of it."""
    if why_not is not None:
        return f"Plans only: {why_not}"
    if not model.towers:
        return "`offplan run` can execute this model."
    left = format_bytes(model.tower_bytes)
    return (
        "`offplan run` executes the text part alone; what reads images or sound "
        f"({left}) stays unloaded."
    )


def render_analysis(analysis: Analysis) -> list[RenderableType]:
    """Show all that a plan rests on, part by part: the model, the machine, reasons and terms."""
    parts = render_model(analysis.held.model)
    if analysis.machine is not None:
        parts.append(render_machine(analysis.machine))
    if analysis.result is not None and analysis.crossovers is not None:
        parts += render_plan(analysis.result, analysis.crossovers)
        if shares := list_shares(analysis.held, analysis.machine, analysis.result.plan):
            parts.append(render_shares(shares))
    return parts
