"""``offplan plan``: just the plan, on stdout."""

import sys
from typing import TYPE_CHECKING

from offplan.cli.options import (
    ChosenBatchOption,
    ContextOption,
    EngineOption,
    ForceOption,
    FrontierOption,
    GPUMemoryOption,
    HostMemoryOption,
    JsonOption,
    MachineOption,
    MaxTPOTOption,
    MaxTTFTOption,
    ModelArgument,
    ObjectiveOption,
    OutputOption,
    OutputTokensOption,
    PromptTokensOption,
    RevisionOption,
    SourceOption,
    StoreOption,
)
from offplan.cli.output import ProgressBar, check_writable, print_json, print_report, write_file
from offplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offplan.planner.frontier import Point


def plan(
    model: ModelArgument,
    machine: MachineOption = None,
    gpu_memory: GPUMemoryOption = None,
    host_memory: HostMemoryOption = None,
    store: StoreOption = "host",
    batch: ChosenBatchOption = None,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 128,
    context: ContextOption = 4096,
    revision: RevisionOption = None,
    source: SourceOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    objective: ObjectiveOption = "latency",
    max_ttft: MaxTTFTOption = None,
    max_tpot: MaxTPOTOption = None,
    frontier: FrontierOption = False,
    engine: EngineOption = None,
) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.asking import ask
    from offplan.checkpoint.open import open_model
    from offplan.cli.planning import note_budget, read_size, read_time, read_workload
    from offplan.machines import find_machine, why_unmeasured
    from offplan.plan import dump_plan
    from offplan.planner.frontier import find_frontier
    from offplan.planner.make import make_plan

    if frontier and output is not None:
        raise InputError("--frontier shows many plans and writes none: leave --output out")
    if frontier and (max_ttft, max_tpot) != (None, None):
        raise InputError(
            "--frontier shows plans whatever their times: leave --max-ttft and --max-tpot out"
        )
    if frontier and objective != "latency":
        raise InputError("--frontier shows the plans of one batch: leave --objective out")
    check_writable(output, force=force)
    gpu_bytes, host_bytes = read_size(gpu_memory), read_size(host_memory)
    ttft_s, tpot_s = read_time(max_ttft), read_time(max_tpot)
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
        gpu_memory=gpu_bytes,
        host_memory=host_bytes,
        store=store,
        objective=objective,
        max_ttft_s=ttft_s,
        max_tpot_s=tpot_s,
        engine=engine,
    )
    note_budget(question, gpu_bytes)
    if frontier:
        _show_frontier(find_frontier(question, ProgressBar("planning")), json=json)
        return
    made = make_plan(question).plan
    if output is not None:
        write_file(output, dump_plan(made), force=force)
    if json:
        print_json(made.model_dump(mode="json"))
    elif output is None:
        sys.stdout.write(dump_plan(made))


def _show_frontier(points: "Sequence[Point]", *, json: bool) -> None:
    from offplan.report.frontier import frontier_payload, render_frontier
    from offplan.report.payload import JSON_VERSION

    if json:
        print_json({"offplan": JSON_VERSION, "frontier": frontier_payload(points)})
    else:
        print_report(render_frontier(points))
