"""``offplan analyze``: the model, the machine, and the plan that suits both."""

from offplan.cli.options import (
    BatchOption,
    ContextOption,
    EngineOption,
    ForceOption,
    GPUMemoryOption,
    HostMemoryOption,
    JsonOption,
    MachineOption,
    ModelArgument,
    OutputOption,
    OutputTokensOption,
    PictureOption,
    PromptTokensOption,
    RevisionOption,
    SourceOption,
    StoreOption,
)
from offplan.cli.output import (
    ProgressBar,
    check_writable,
    draw_report,
    print_json,
    print_note,
    print_report,
    write_file,
)
from offplan.errors import InfeasibleError, InputError


def analyze(
    model: ModelArgument,
    machine: MachineOption = None,
    gpu_memory: GPUMemoryOption = None,
    host_memory: HostMemoryOption = None,
    store: StoreOption = "host",
    batch: BatchOption = 1,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 128,
    context: ContextOption = 4096,
    revision: RevisionOption = None,
    source: SourceOption = None,
    output: OutputOption = None,
    svg: PictureOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Show a model's layers, the machine, and the plan for a workload and a budget."""
    from offplan.asking import ask
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import note_budget, read_size, read_workload
    from offplan.machines import find_machine, why_unmeasured
    from offplan.plan import dump_plan
    from offplan.report.analysis import Analysis, analyze_question, render_analysis
    from offplan.report.payload import analyze_payload

    check_writable(output, svg, force=force)
    gpu_bytes, host_bytes = read_size(gpu_memory), read_size(host_memory)
    workload = read_workload(batch, prompt_tokens, output_tokens, context)
    found = open_model(
        model, revision=revision, name=source, on_progress=ProgressBar("reading headers")
    )
    chosen = find_machine(machine, found, workload, store=store, on_stage=ProgressBar)
    if chosen is None:
        analysis = Analysis(found, None, unmeasured=why_unmeasured())
    else:
        question = ask(
            found,
            chosen,
            workload,
            gpu_memory=gpu_bytes,
            host_memory=host_bytes,
            store=store,
            engine=engine,
        )
        note_budget(question, gpu_bytes)
        analysis = analyze_question(question)
    if json:
        print_json(analyze_payload(analysis))
    else:
        print_report(*render_analysis(analysis))
    if svg is not None:
        picture = draw_report(f"offplan analyze {model}", *render_analysis(analysis))
        write_file(svg, picture, force=force)
        print_note(f"wrote {svg}")
    if output is None:
        return
    if analysis.result is None:
        kind = InfeasibleError if analysis.infeasible else InputError
        raise kind(f"{output} was not written: there is no plan")
    write_file(output, dump_plan(analysis.result.plan), force=force)
    print_note(f"wrote {output}")
