"""``offplan plan``: just the plan, on stdout."""

import sys

from offplan.cli.options import (
    BatchOption,
    ContextOption,
    ForceOption,
    GPUMemoryOption,
    HostMemoryOption,
    JsonOption,
    MachineOption,
    ModelArgument,
    OutputOption,
    OutputTokensOption,
    PromptTokensOption,
    RevisionOption,
    SourceOption,
)
from offplan.cli.output import check_writable, print_json, write_file
from offplan.errors import InputError


def plan(
    model: ModelArgument,
    machine: MachineOption = None,
    gpu_memory: GPUMemoryOption = None,
    host_memory: HostMemoryOption = None,
    batch: BatchOption = 1,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 128,
    context: ContextOption = 4096,
    revision: RevisionOption = None,
    source: SourceOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.cli.models import open_named_model
    from offplan.cli.planning import find_machine, read_wishes, read_workload, unmeasured
    from offplan.plan import dump_plan, plan_json
    from offplan.planner import make_plan

    check_writable(output, force=force)
    workload = read_workload(batch, prompt_tokens, output_tokens, context)
    wishes = read_wishes(workload, gpu_memory, host_memory)
    found = open_named_model(model, revision, source)
    chosen = find_machine(machine, found, workload)
    if chosen is None:
        raise InputError(unmeasured())
    made = make_plan(found, chosen.profile, workload, wishes.budget(chosen)).plan
    if output is not None:
        write_file(output, dump_plan(made), force=force)
    if json:
        print_json(plan_json(made))
    elif output is None:
        sys.stdout.write(dump_plan(made))
