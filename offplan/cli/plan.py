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
    Objective,
    ObjectiveOption,
    OutputOption,
    OutputTokensOption,
    PromptTokensOption,
    RevisionOption,
    SourceOption,
    Store,
    StoreOption,
)
from offplan.cli.output import Progress, check_writable, print_json, print_report, write_file
from offplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offplan.planner.frontier import Point


def plan(
    model: ModelArgument,
    machine: MachineOption = None,
    gpu_memory: GPUMemoryOption = None,
    host_memory: HostMemoryOption = None,
    store: StoreOption = Store.HOST,
    batch: ChosenBatchOption = None,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 128,
    context: ContextOption = 4096,
    revision: RevisionOption = None,
    source: SourceOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    objective: ObjectiveOption = Objective.LATENCY,
    max_ttft: MaxTTFTOption = None,
    max_tpot: MaxTPOTOption = None,
    frontier: FrontierOption = False,
    engine: EngineOption = None,
) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan import plan as plans
    from offplan.cli.models import open_named_model
    from offplan.cli.planning import (
        find_machine,
        read_wishes,
        read_workload,
        unmeasured,
    )
    from offplan.plan import Goal, dump_plan, plan_json
    from offplan.planner.frontier import find_frontier
    from offplan.planner.make import make_plan
    from offplan.question import Question
    from offplan.units import parse_seconds

    if frontier and output is not None:
        raise InputError("--frontier shows many plans and writes none: leave --output out")
    if frontier and (max_ttft, max_tpot) != (None, None):
        raise InputError(
            "--frontier shows plans whatever their times: leave --max-ttft and --max-tpot out"
        )
    if frontier and objective is not Objective.LATENCY:
        raise InputError("--frontier shows the plans of one batch: leave --objective out")
    check_writable(output, force=force)
    ttft_s, tpot_s = (None if t is None else parse_seconds(t) for t in (max_ttft, max_tpot))
    workload = read_workload(batch or 1, prompt_tokens, output_tokens, context)
    wishes = read_wishes(workload, gpu_memory, host_memory)
    found = open_named_model(model, revision, source)
    chosen = find_machine(machine, found, workload, store)
    if chosen is None:
        raise InputError(unmeasured())
    chooses_batch = objective is Objective.THROUGHPUT and batch is None
    question = Question(
        found,
        chosen.profile,
        workload,
        wishes.budget(chosen.with_store(store)),
        Goal(
            objective=plans.Objective.THROUGHPUT if chooses_batch else plans.Objective.LATENCY,
            max_ttft=ttft_s,
            max_tpot=tpot_s,
            engine=None if engine is None else engine.value,
        ),
        store.value,
        machine,
    )
    if frontier:
        points = find_frontier(question, Progress("planning"))
        _show_frontier(points, json=json)
        return
    made = make_plan(question).plan
    if output is not None:
        write_file(output, dump_plan(made), force=force)
    if json:
        print_json(plan_json(made))
    elif output is None:
        sys.stdout.write(dump_plan(made))


def _show_frontier(points: "Sequence[Point]", *, json: bool) -> None:
    from offplan.report.frontier import frontier_payload, render_frontier
    from offplan.report.payload import JSON_VERSION

    if json:
        print_json({"offplan": JSON_VERSION, "frontier": frontier_payload(points)})
    else:
        print_report(render_frontier(points))
