"""``offplan analyze``: the model, the machine, and the plan that suits both."""

from offplan.cli import options
from offplan.cli.output import (
    ProgressBar,
    check_writable,
    draw_report,
    print_note,
    print_result,
    save_file,
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
    context: options.Context = 4096,
    revision: options.Revision = None,
    source: options.Source = None,
    output: options.Output = None,
    svg: options.Picture = None,
    force: options.Force = False,
    json: options.Json = False,
    engine: options.Engine = None,
) -> None:
    """Show a model's layers, the machine, and the plan for a workload and a budget."""
    from offplan.asking import ask
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import note_budget, read_workload, save_plan
    from offplan.machines import find_machine, why_unmeasured
    from offplan.report.analysis import Analysis, analyze_question, render_analysis
    from offplan.report.payload import analyze_payload
    from offplan.runnable import why_not_run

    check_writable(output, svg, force=force)
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
        analysis = analyze_question(question)
    report = render_analysis(analysis)
    print_result(analyze_payload(analysis), *report, json=json)
    if svg is not None:
        save_file(svg, draw_report(f"offplan analyze {model}", *report), force=force)
    if output is None:
        return
    if analysis.result is None:
        kind = InfeasibleError if analysis.infeasible else InputError
        raise kind(f"{output} was not written: there is no plan")
    save_plan(output, analysis.result.plan, force=force)
    print_note(f"wrote {output}")
