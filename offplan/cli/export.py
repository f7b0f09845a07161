"""``offplan export``: a plan as another engine's command."""

import shlex
from dataclasses import replace
from typing import Annotated

import typer

from offplan.choices import ExportFormat
from offplan.cli import options
from offplan.cli.output import print_note, print_result, printable, waiting
from offplan.errors import InputError


def export(
    plan: options.Plan,
    engine: Annotated[
        str | None,
        options.take_engine(
            "--engine",
            help="Whose command: vllm, vllm-worker, sglang, or a version of it, vllm==0.31. "
            "[default: the plan's]",
        ),
    ] = None,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format", **options.choice(ExportFormat), help="How the command is written."
        ),
    ] = "command",
    replan: Annotated[
        bool,
        typer.Option("--replan", help="Export the fastest plan that the engine can run."),
    ] = False,
    tensor_parallel: Annotated[int, options.take_ranks("--tp", "--replan")] = 1,
    pipeline_parallel: Annotated[int, options.take_ranks("--pp", "--replan")] = 1,
    expert_parallel: Annotated[int, options.take_ranks("--ep", "--replan")] = 1,
    model: options.LocalModel = None,
    json: options.Json = False,
) -> None:
    """Print the command by which an engine does what a plan says, or say why it cannot.

    It holds the engine to the plan's type, workload and budget, too. With --replan the same
    question is asked again, of plans that the engine can run, on as many GPUs as named.
    """
    from offplan.capabilities.ranks import ONE_RANK, OPTIONS, Ranks
    from offplan.cli.planning import open_plan
    from offplan.engines.engine import format_version
    from offplan.engines.export import render_export
    from offplan.engines.registry import ENGINES, find_engine
    from offplan.library.exporting import describe_cost, export_here, plan_for
    from offplan.report.answer import describe_fetch

    if engine is not None:
        find_engine(engine)  # a name that is none, before the model is opened
    loaded, found = open_plan(plan, model)
    engine = engine or loaded.goal.engine
    if engine is None:
        raise InputError(f"the plan names no engine: add --engine, one of {', '.join(ENGINES)}")
    if find_engine(engine)[0].is_worker and replan:
        raise InputError(
            f"--replan and --engine {engine}: a worker reads the plan from its file; make it with "
            f"offplan plan --for {engine}, and export that"
        )
    asked = Ranks(tensor_parallel, pipeline_parallel, expert_parallel)
    ranks = loaded.goal.ranks if asked == ONE_RANK else asked
    if ranks != loaded.goal.ranks and not replan:
        raise InputError(
            f"{ranks.label}: the plan is for {loaded.goal.ranks.label or 'one GPU'}, and what a "
            "rank holds is another model: add --replan, or plan with these options"
        )
    if replan:
        with waiting("planning"):
            made = plan_for(loaded, found, engine, **dict(zip(OPTIONS, ranks, strict=True)))
        print_note(f"planned again for {engine}: predicted {describe_cost(loaded, made)}")
        loaded = made
    with waiting("planning"):  # where it is refused, for what it would cost
        export = export_here(loaded, found, engine, plan)
    fetch, folder = describe_fetch(found)
    if model is not None:
        export = replace(export, source=model)
    elif folder:
        note = f"{export.source} has no weights: {fetch}name their folder with --model {folder}"
        export = replace(export, notes=(note, *export.notes))
    version = format_version(export.version)
    proof = ["offplan", "check", str(plan), "--engine", engine, "--log", "start.log"]
    proof += [] if model is None else ["--model", model]
    check = shlex.join(proof)
    if json:
        payload = {
            "engine": export.engine.name,
            "version": version,
            "flags": export.flags,
            "command": export.command,
            "environment": dict(export.demand.environment),
            "notes": export.notes,
            "check": None if replan else check,
        }
        print_result(payload, json=True)
        return
    print_note(f"for {export.engine.title} {version}")
    for note in export.notes:
        print_note(note)
    if not replan:
        print_note(
            "next: start it with its output in a file (`... 2>&1 | tee start.log`); then "
            f"`{check}` proves that it does what the plan says"
        )
    print(printable(render_export(export, form)), end="")
