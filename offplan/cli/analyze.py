"""``offplan analyze``: the model, the machine, and the plan that suits both."""

from typing import TYPE_CHECKING

from offplan.cli.options import (
    BatchOption,
    ContextOption,
    Engine,
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
    Store,
    StoreOption,
)
from offplan.cli.output import (
    check_writable,
    draw_report,
    print_json,
    print_note,
    print_report,
    write_file,
)
from offplan.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.cli.planning import Wishes
    from offplan.report.analysis import Analysis


def analyze(
    model: ModelArgument,
    machine: MachineOption = None,
    gpu_memory: GPUMemoryOption = None,
    host_memory: HostMemoryOption = None,
    store: StoreOption = Store.HOST,
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
    from offplan.cli.models import open_named_model
    from offplan.cli.planning import read_wishes, read_workload
    from offplan.plan import dump_plan
    from offplan.report.analysis import render_analysis
    from offplan.report.payload import analyze_payload

    check_writable(output, svg, force=force)
    workload = read_workload(batch, prompt_tokens, output_tokens, context)
    wishes = read_wishes(workload, gpu_memory, host_memory)
    named = open_named_model(model, revision, source)
    analysis = _analyze(named, machine, wishes, store, engine)
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


def _analyze(
    model: "Model", machine: str | None, wishes: "Wishes", store: Store, engine: Engine | None
) -> "Analysis":
    """Plan if there is a machine to plan for; a plan that does not exist is a finding too."""
    from offplan.cli.planning import find_machine, unmeasured
    from offplan.costs.crossovers import find_crossovers
    from offplan.plan import Goal
    from offplan.planner.make import make_plan
    from offplan.question import Question
    from offplan.report.analysis import Analysis

    found = find_machine(machine, model, wishes.workload, store)
    if found is None:
        return Analysis(model, None, unmeasured=unmeasured())
    planned = found.with_store(store)
    try:
        question = Question(
            model,
            found.profile,
            wishes.workload,
            wishes.budget(planned),
            Goal(engine=None if engine is None else engine.value),
            store.value,
            machine,
        )
        result = make_plan(question)
    except InfeasibleError as error:
        return Analysis(model, found.profile, infeasible=error)
    crossovers = find_crossovers(model, planned.profile, result.plan)
    return Analysis(model, found.profile, result, crossovers)
