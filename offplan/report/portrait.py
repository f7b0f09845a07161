"""All that is drawn of one plan, and the words beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offplan.costs.lanes import RequestLanes, trace_plan
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.plan import Goal, Plan
from offplan.planner.frontier import Point
from offplan.report.answer import (
    describe_fit,
    describe_model,
    describe_plainly,
    describe_speed,
)
from offplan.report.bench_file import OWN_RUNTIME, BenchFile
from offplan.report.pictures.canvas import Canvas
from offplan.report.pictures.compared import draw_comparison
from offplan.report.pictures.frontier import draw_frontier
from offplan.report.pictures.layers import draw_layers
from offplan.report.pictures.memory import draw_memory
from offplan.report.pictures.timeline import draw_lanes
from offplan.report.run import list_differences
from offplan.report.shares import describe_shares
from offplan.units import format_budget, format_bytes, format_frequency, format_seconds


@dataclass(frozen=True)
class Portrait:
    """A plan, and what is known of it."""

    plan: Plan
    stages: Sequence[Stage]
    """Weights of a GPU of each stage, packed as the plan says."""
    machine: MachineProfile | None = None
    """The machine that the plan is for; None if its figures are not known."""
    lanes: RequestLanes | None = None
    """Lanes of compute and link on that machine; None if it is not known, and on engines."""
    frontier: Sequence[Point] = ()
    """The best plans of other budgets; empty if they were not asked for."""
    bench: BenchFile | None = None
    """The benchmark's result; None if nothing was measured."""

    def say(self) -> list[str]:
        """Answer in sentences: what it is, whether it fits, how fast it is, what lies where."""
        fit, shares = self.plan.describe_excess(), list[str]()
        if self.machine is not None:
            fit = fit or describe_fit(self.plan, self.machine)
            shares = describe_shares(self.plan, self.stages, self.machine)
        # a file may say anything
        speed = describe_speed(self.plan) if self.plan.prediction.decode.step_s else None
        lines = [fit, *shares, speed, describe_plainly(self.plan, self.stages)]
        return [describe_model(self.stages[0].model), *filter(None, lines)]

    def headline(self) -> list[tuple[str, str]]:
        """Return the four figures that people ask for first, each with what it is."""
        plan, predicted = self.plan, self.plan.prediction
        fits = "too large" if plan.describe_excess() else "fits"
        total = format_bytes(predicted.gpu_memory.total_bytes)
        workload, step_s = plan.workload, predicted.decode.step_s
        rate = format_frequency(workload.batch / step_s) if step_s else "-"
        host = predicted.host_memory_bytes
        return [
            (fits, f"{total} of {format_budget(plan.budget.gpu_memory)} on the GPU"),
            (rate, f"tokens a second ({predicted.basis})"),
            (format_seconds(predicted.prefill.step_s), "to the first token"),
            (format_bytes(host) if host else "none", "of page-locked host memory"),
        ]

    def draw(self) -> Iterator[tuple[str, str, Canvas]]:
        """Yield the pictures that there are: a heading, what is to be known beside it, the picture.

        Raises PlanError for rules that do not fit the model.
        """
        plan, basis = self.plan, self.plan.prediction.basis
        piles = "First to last, a column each; the one apart is what lies outside of them."
        stages = self.stages
        places = [f" in stage {n}" * (len(stages) > 1) for n in range(len(stages))]
        for where, stage in zip(places, stages, strict=True):
            yield f"Layers{where}", piles, draw_layers(stage, plan.offload)
        told = "Each bar is as long as its budget; one without a budget is at the GPU's scale."
        if len(stages) > 1:
            told += " GPU memory: one GPU of the stage that takes most. Host memory: all stages."
        yield "Memory", told, draw_memory(plan)
        if self.lanes is not None:
            steps = format_seconds(self.lanes.prefill.step_s)
            title = f"A prompt of {plan.workload.prompt_tokens} tokens: {steps}"
            yield title, f"Left to right, {basis}.", draw_lanes(self.lanes.prefill)
            title = f"A decode step: {format_seconds(self.lanes.decode.step_s)}"
            told = f"In steady state, each step like the one before; {basis}."
            yield title, told, draw_lanes(self.lanes.decode)
        if self.frontier:
            told = f"Tokens a second, prompt included, by GPU memory (logarithmic scale; {basis})."
            yield "What more memory buys", told, draw_frontier(self.frontier, plan)
        if self.bench is not None:
            lines = [f"On {self.bench.device}."]
            if plan.goal.engine is not None:
                lines.append(f"The plan is for {plan.goal.engine}; offplan's own runtime ran it.")
                if self.bench.runtime.predicted == OWN_RUNTIME:
                    plan = plan.model_copy(update={"goal": Goal()})
            lines += list_differences(plan, self.bench)
            yield "Predicted and measured", " ".join(lines), draw_comparison(self.bench)


def portray(plan: Plan, stages: Sequence[Stage], machine: MachineProfile) -> Portrait:
    """Follow a plan of a machine through time; ``stages`` are packed as it says.

    Raises PlanError for rules that do not fit the model, and ProfileError where the link to the
    plan's store is not known.
    """
    linked = machine.with_link(plan.offload.store, plan.goal)
    # an engine's queues are not the schedule's
    lanes = trace_plan(plan, stages[0], linked) if plan.goal.engine is None else None
    return Portrait(plan, stages, machine, lanes)
