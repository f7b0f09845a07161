"""``offplan plan``: just the plan, on stdout."""

import sys

from offplan.cli import options
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_writable,
    print_json,
    print_note,
    print_result,
    waiting,
)
from offplan.errors import InputError


def plan(
    model: options.Model,
    machine: options.Machine = None,
    gpu_memory: options.GPUMemory = None,
    host_memory: options.HostMemory = None,
    store: options.Store = "host",
    batch: options.ChosenBatch = None,
    prompt_tokens: options.PromptTokens = 512,
    output_tokens: options.OutputTokens = 128,
    context: options.ChosenContext = 4096,
    revision: options.Revision = None,
    source: options.Source = None,
    output: options.Output = None,
    force: options.Force = False,
    json: options.Json = False,
    objective: options.Objective = "latency",
    max_ttft: options.MaxTTFT = None,
    max_tpot: options.MaxTPOT = None,
    frontier: options.Frontier = False,
    engine: options.Engine = None,
) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import note_budget, read_workload, save_plan, settle_context
    from offplan.library.asking import ask
    from offplan.library.machines import find_machine, why_unmeasured
    from offplan.library.runnable import why_not_run
    from offplan.plan import dump_plan
    from offplan.planner.frontier import find_frontier
    from offplan.planner.make import make_plan
    from offplan.report.analysis import describe_running
    from offplan.report.frontier import frontier_payload, render_frontier
    from offplan.report.payload import plan_payload

    if output == STANDARD:  # where it goes anyway
        output = None
    if frontier and output is not None:
        raise InputError("--frontier shows many plans and writes none: leave --output out")
    if frontier and (max_ttft, max_tpot) != (None, None):
        raise InputError(
            "--frontier shows plans whatever their times: leave --max-ttft and --max-tpot out"
        )
    if frontier and objective != "latency":
        raise InputError("--frontier shows the plans of one batch: leave --objective out")
    check_writable(output, force=force)
    workload = read_workload(batch or 1, prompt_tokens, output_tokens, context)
    found = open_model(
        model, revision=revision, name=source, on_progress=ProgressBar("reading headers")
    )
    chosen = find_machine(machine, found, workload, store=store, on_stage=ProgressBar)
    if chosen is None:
        raise InputError(why_unmeasured())
    if batch is not None:  # a named batch leaves none to be chosen
        objective = "latency"
    question = ask(
        found,
        chosen,
        workload,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        store=store,
        objective=objective,
        max_ttft_s=max_ttft,
        max_tpot_s=max_tpot,
        engine=engine,
    )
    note_budget(question, gpu_memory)
    with waiting("planning"):
        question = settle_context(question, context)
    if frontier:
        points = find_frontier(question, ProgressBar("planning"))
        print_result({"frontier": frontier_payload(points)}, render_frontier(points), json=json)
        return
    with waiting("planning"):
        made = make_plan(question).plan
    why_not = why_not_run(found)
    print_note(describe_running(found, why_not))
    if output is not None:
        save_plan(output, made, force=force)
    if json:
        print_json(plan_payload(made, why_not))
    elif output is None:
        sys.stdout.write(dump_plan(made))
