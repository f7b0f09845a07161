"""All that is drawn of one plan, and the words beside it."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

import offplan
from offplan.costs.lanes import RequestLanes, trace_plan
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.plan import Goal, Plan
from offplan.planner.frontier import Point
from offplan.report.answer import (
    Speed,
    describe_fit,
    describe_model,
    describe_plainly,
    describe_speed,
    print_speed,
)
from offplan.report.bench_file import OWN_RUNTIME, BenchFile
from offplan.report.pictures.canvas import LINE, STYLE, Canvas, element
from offplan.report.pictures.compared import draw_comparison
from offplan.report.pictures.frontier import draw_frontier
from offplan.report.pictures.layers import draw_layers, draw_memory
from offplan.report.pictures.timeline import draw_lanes
from offplan.report.run import list_differences
from offplan.report.shares import describe_shares
from offplan.units import format_budget, format_bytes


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
        # a file may say anything
        speed = print_speed(plan) if predicted.decode.step_s else Speed("-", "-", "-")
        host = predicted.host_memory_bytes
        return [
            (fits, f"{total} of {format_budget(plan.budget.gpu_memory)} on the GPU"),
            (speed.rate, f"tokens a second ({predicted.basis})"),
            (speed.first, "to the first token"),
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
            prompt = f"A prompt of {plan.workload.prompt_tokens:,} tokens"
            told = f"Left to right, {basis}{_middle(plan)}."
            yield prompt, told, draw_lanes(self.lanes.prefill)
            told = f"In steady state, each step like the one before; {basis}{_middle(plan)}."
            yield "A decode step", told, draw_lanes(self.lanes.decode)
        if self.frontier:
            told = f"Tokens a second by GPU memory (logarithmic scale; {basis}{_middle(plan)})."
            yield "What more memory buys", told, draw_frontier(self.frontier, plan)
        if self.bench is not None:
            lines = [f"On {self.bench.device}."]
            if plan.goal.engine is not None:
                lines.append(f"The plan is for {plan.goal.engine}; offplan's own runtime ran it.")
                if self.bench.runtime.predicted == OWN_RUNTIME:
                    plan = plan.model_copy(update={"goal": Goal()})
            lines += list_differences(plan, self.bench)
            yield "Predicted and measured", " ".join(lines), draw_comparison(self.bench)


def _middle(plan: Plan) -> str:
    """Say that a picture is drawn with the time within the range that the words have."""
    return "" if plan.prediction.basis == "measured" else " within the range above"


def portray(plan: Plan, stages: Sequence[Stage], machine: MachineProfile) -> Portrait:
    """Follow a plan of a machine through time; ``stages`` are packed as it says.

    Raises PlanError for rules that do not fit the model, and ProfileError where the link to the
    plan's store is not known.
    """
    linked = machine.with_link(plan.offload.store, plan.goal)
    # an engine's queues are not the schedule's
    lanes = trace_plan(plan, stages[0], linked) if plan.goal.engine is None else None
    return Portrait(plan, stages, machine, lanes)


WIDTH = 800
MARGIN = 24
_CHARACTERS = {"strong": 76, "plain": 92, "faint": 98}
"""Characters of a line of text that surely fit the width, in fonts as wide as DejaVu Sans."""


def draw_poster(portrait: Portrait) -> str:
    """Return what is said and drawn of a plan as the text of an SVG file."""
    title, *lines = portrait.say()
    figures = Canvas()
    figures.figures(portrait.headline())
    head, *texts = _write(title, [], "plain"), _write("", lines, "plain")
    canvases = [(title, head), ("The figures", figures), *((title, text) for text in texts)]
    for heading, told, canvas in portrait.draw():
        canvases += [(heading, _write(heading, [told], "faint")), (heading, canvas)]
    top, drawn = MARGIN, []
    for name, canvas in canvases:
        drawn.append(canvas.draw(name, top))
        top += canvas.height + LINE // 2
    height = str(top + MARGIN - LINE // 2)
    inner = element("svg", *drawn, x=str(MARGIN), width=str(WIDTH - 2 * MARGIN), height=height)
    page = element("rect", width="100%", height="100%", style="fill: var(--page)")
    look = element("style", STYLE)
    size = {"width": str(WIDTH), "height": height, "viewBox": f"0 0 {WIDTH} {height}"}
    # in a narrow window it shrinks as a whole
    size["style"] = "max-width: 100%; height: auto"
    kind = {"class_": "offplan", "xmlns": "http://www.w3.org/2000/svg"}
    return tostring(element("svg", look, page, inner, **kind, **size), encoding="unicode") + "\n"


def _write(heading: str, lines: Sequence[str], kind: str) -> Canvas:
    """Write a heading and what stands below it."""
    canvas = Canvas()
    canvas.space()
    for line, look in ((heading, "strong"), *((line, kind) for line in lines)):
        for part in textwrap.wrap(line, _CHARACTERS[look]):
            canvas.text(part, look)
    return canvas


_LAYOUT = """\
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.45; }
main { max-width: 56rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.5rem 0; }
h2 { font-size: 1.05rem; margin: 2rem 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 0.6rem; margin: 0.8rem 0; }
.figures div { border: 1px solid var(--rest); border-radius: 6px; padding: 0.6rem 0.8rem; }
.figures b { display: block; font-size: clamp(1.1rem, 4.5vw, 1.35rem); line-height: 1.3; }
.figures span { color: var(--faint); }
p.faint { color: var(--faint); margin: 0.2rem 0 0.6rem; }
pre { overflow-x: auto; font-size: 12px; }
"""


def write_page(portrait: Portrait, file: str, notes: Sequence[str]) -> str:
    """Write a page about a plan and its ``file``; ``notes`` say what is not shown, and why."""
    title, *lines = portrait.say()
    figures = [
        element("div", element("b", figure), element("span", told))
        for figure, told in portrait.headline()
    ]
    parts = [
        element("h1", title),
        element("div", *figures, class_="figures"),
        *(element("p", line) for line in lines),
    ]
    for heading, told, canvas in portrait.draw():
        faint = element("p", told, class_="faint")
        picture = canvas.draw(heading)
        parts.append(element("section", element("h2", heading), faint, picture))
    parts += [element("p", note, class_="faint") for note in notes]
    text = element("pre", file)
    parts.append(element("details", element("summary", "The plan file"), text))
    parts.append(element("p", f"Made by offplan {offplan.__version__}.", class_="faint"))
    return "<!DOCTYPE html>\n" + tostring(
        _document(title, parts), encoding="unicode", method="html"
    )


def _document(title: str, parts: Sequence[Element]) -> Element:
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # a page that a plan's own words are in is to do nothing but show them
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        element("title", title),
        element("style", STYLE + _LAYOUT),
    ]
    body = element("body", element("main", *parts), class_="offplan")
    return element("html", element("head", *head), body, lang="en")
