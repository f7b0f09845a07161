"""``offplan report``: a plan as one page to look at."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offplan.cli import options
from offplan.cli.output import ProgressBar, check_writable, printable, save_file
from offplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from offplan.planner.question import Question


def report(
    plan: options.Plan,
    output: options.Output = None,
    force: options.Force = False,
    model: options.LocalModel = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Show the plan on this machine profile, by name or file, instead."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Show what `bench --json` printed of this plan beside its prediction."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Save the pictures as one SVG file, as analyze --svg.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write prompt and steps as a trace for Perfetto, measured ones too."),
    ] = None,
) -> None:
    """Draw a plan as one HTML page: layers, memory, a prompt and a step in time, the frontier.

    The page needs nothing beside itself. Times and frontier need the profile that the plan was made
    from, or --machine.
    """
    from offplan.cli.planning import open_plan, price_asked
    from offplan.library.asking import ask_again
    from offplan.library.machines import load_machine
    from offplan.library.repricing import hold_planned
    from offplan.plan import dump_plan, load_plan
    from offplan.planner.frontier import find_frontier
    from offplan.report.bench_file import load_bench
    from offplan.report.portrait import Portrait, draw_poster, portray, write_page
    from offplan.report.trace import write_trace

    if output is None and trace is None and svg is None:
        raise InputError("name the page to write: -o report.html, or --svg FILE")
    check_writable(output, svg, trace, force=force)
    notes, loaded = [], load_plan(plan)
    if trace is not None and loaded.goal.engine is not None:
        raise InputError(
            f"{trace} was not written: {loaded.goal.engine} runs the plan by rules of its own, "
            "which are not drawn; leave out --trace"
        )
    if machine is None and loaded.machine.profile is None:
        priced, found = open_plan(plan, model)
        portrait = Portrait(priced, hold_planned(priced, found))
        notes.append(
            f"Neither time nor frontier is shown: the figures of {loaded.machine.name} were "
            "measured and kept in no profile; name one with --machine."
        )
    else:
        chosen = None if machine is None else load_machine(machine)
        progress = ProgressBar("reading headers")
        question = ask_again(loaded, model=model, machine=chosen, on_progress=progress)
        # no more than the machine has, which may be another one than the plan's
        asked = loaded.model_copy(update={"budget": question.budget})
        priced = price_asked(plan, asked, question)
        portrait = portray(priced, question.hold(priced.offload), question.machine)
        if portrait.lanes is None:
            notes.append(
                f"A prompt and a step in time are not drawn: {priced.goal.engine} runs the plan by "
                "rules of its own."
            )
        if output is not None or svg is not None:
            try:
                points = find_frontier(_widen(question), ProgressBar("planning"))
                portrait = replace(portrait, frontier=points)
            except InfeasibleError as error:
                notes.append(f"There is no frontier: {error}.")
    if bench is not None:
        portrait = replace(portrait, bench=load_bench(bench, portrait.plan))
    if output is not None:
        page = write_page(portrait, dump_plan(loaded), notes)
        save_file(output, printable(page), force=force)
    if svg is not None:
        save_file(svg, printable(draw_poster(portrait)), force=force)
    if trace is not None:
        if portrait.lanes is None:
            raise InputError(f"{trace} was not written. {notes[0]}")
        save_file(trace, write_trace(portrait.lanes, portrait.bench), force=force)


def _widen(question: "Question") -> "Question":
    """Ask for any plan of a question's batch, whatever its time, in all of the machine's memory."""
    goal = question.goal.model_copy(
        update={"objective": "latency", "max_ttft_s": None, "max_tpot_s": None}
    )
    return replace(question, goal=goal).with_gpu_memory(question.machine.gpu_memory.value)
