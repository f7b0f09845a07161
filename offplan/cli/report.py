"""``offplan report``: a plan as one page to look at."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.output import ProgressBar, check_writable, print_note, printable, save_file
from offplan.errors import InputError


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
) -> None:
    """Draw a plan as one HTML page: layers, memory, a prompt and a step in time, the frontier.

    The page needs nothing beside itself. Times and frontier need the profile that the plan was made
    from, or --machine.
    """
    from offplan.asking import ask_again
    from offplan.cli.planning import open_plan
    from offplan.machines import load_machine
    from offplan.plan import Goal, load_plan
    from offplan.planner.frontier import find_frontier
    from offplan.report.bench_file import load_bench
    from offplan.report.page import write_page
    from offplan.report.portrait import Portrait, portray
    from offplan.repricing import list_changes, price_on

    if output is None:
        raise InputError("name the page to write: -o report.html")
    check_writable(output, force=force)
    notes, loaded = [], load_plan(plan)
    if machine is None and loaded.machine.profile is None:
        priced, found = open_plan(plan, model)
        portrait = Portrait(priced, found.as_loaded_by(priced.goal.engine))
        notes.append(
            f"Not shown: time and frontier. The figures of {loaded.machine.name} were measured and "
            "kept in no profile; name one with --machine."
        )
    else:
        chosen = None if machine is None else load_machine(machine)
        progress = ProgressBar("reading headers")
        question = ask_again(loaded, model=model, machine=chosen, on_progress=progress)
        priced = price_on(loaded, question.model, question.planned_machine)
        if changes := list_changes(loaded, priced):
            print_note(f"{plan} says otherwise: {'; '.join(changes)} here")
        widest = replace(question, goal=Goal(engine=question.goal.engine)).with_gpu_memory(
            question.machine.gpu_memory.value
        )
        points = find_frontier(widest, ProgressBar("planning"))
        portrait = replace(portray(priced, question.model, question.machine), frontier=points)
    if bench is not None:
        portrait = replace(portrait, bench=load_bench(bench, portrait.plan))
    save_file(output, printable(write_page(portrait, notes)), force=force)
