"""``offplan analyze``: the model, the machine, and the plan that suits both."""

import shlex
import sys

from offplan.cli import options
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_writable,
    print_note,
    print_result,
    printable,
    save_file,
    waiting,
)
from offplan.errors import InfeasibleError, InputError


def analyze(
    model: options.Model,
    machine: options.Machine = None,
    gpu_memory: options.GPUMemory = None,
    host_memory: options.HostMemory = None,
    store: options.Store = "host",
    batch: options.Batch = 1,
    prompt_tokens: options.PromptTokens = 512,
    output_tokens: options.OutputTokens = 128,
    context: options.ChosenContext = 4096,
    revision: options.Revision = None,
    source: options.Source = None,
    output: options.Output = None,
    svg: options.Picture = None,
    force: options.Force = False,
    json: options.Json = False,
    engine: options.Engine = None,
    verbose: options.Verbose = False,
) -> None:
    """Say whether a model fits a machine, how fast it runs there, and by which plan."""
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import note_budget, read_workload, save_plan, settle_context
    from offplan.library.asking import ask
    from offplan.library.machines import find_machine, why_unmeasured
    from offplan.library.runnable import why_not_run
    from offplan.report.analysis import Analysis, analyze_question, render_analysis
    from offplan.report.answer import render_answer
    from offplan.report.payload import analyze_payload
    from offplan.report.portrait import portray
    from offplan.report.poster import draw_poster

    check_writable(output, svg, force=force)
    if json and STANDARD in (output, svg):
        raise InputError("--json is printed to stdout: name another file with --output and --svg")
    workload = read_workload(batch, prompt_tokens, output_tokens, context)
    found = open_model(
        model, revision=revision, name=source, on_progress=ProgressBar("reading headers")
    )
    chosen = find_machine(machine, found, workload, store=store, on_stage=ProgressBar)
    if chosen is None:
        analysis = Analysis(found, why_not_run(found), None, unmeasured=why_unmeasured())
    else:
        question = ask(
            found,
            chosen,
            workload,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            store=store,
            engine=engine,
        )
        note_budget(question, gpu_memory)
        with waiting("planning"):
            question = settle_context(question, context)
            analysis = analyze_question(question)
    plan_file = None if output in (None, STANDARD) else str(output)
    answer = render_answer(analysis, shlex.join(["offplan", *sys.argv[1:]]), plan_file)
    # without a plan the answer is all there is to say
    report = [*answer, *(render_analysis(analysis) if analysis.result is not None else [])]
    print_result(
        analyze_payload(analysis),
        *(report if verbose else answer),
        json=json,
        file=sys.stderr if STANDARD in (output, svg) else None,
    )
    files, result = [each for each in (svg, output) if each], analysis.result
    if not files:
        return
    if result is None or chosen is None:
        kind = InfeasibleError if analysis.infeasible else InputError
        raise kind(f"{files[0]} was not written: there is no plan")
    if svg is not None:
        portrait = portray(result.plan, analysis.model, chosen.profile)
        save_file(svg, printable(draw_poster(portrait)), force=force)
    if output is not None:
        save_plan(output, result.plan, force=force)
        if output != STANDARD:
            print_note(f"wrote {output}")
