"""Plans and values that commands read from options, and the notes on them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.cli.options import LONGEST, WorkloadOptions
from offplan.cli.output import ProgressBar, print_note, save_file
from offplan.errors import InputError
from offplan.library.planned import open_planned_model
from offplan.library.repricing import list_changes, price_again, price_as_run, price_on
from offplan.machine.name import parse_name
from offplan.machine.profile import MachineProfile
from offplan.plan import WORKLOADS, Goal, Plan, Workload, dump_plan, load_plan
from offplan.planner.longest import find_longest_context, most_context
from offplan.planner.question import Question
from offplan.records import Record, explain
from offplan.report.wording import name_options
from offplan.stores import SECOND_GPU_STORES, StoreName
from offplan.units import format_budget, format_bytes


def read_workload(given: WorkloadOptions) -> Workload:
    """Check the workload, with the shortest context in place of LONGEST, which is yet to be found.

    Raises InputError if it contradicts itself.
    """
    numbers = {**dict(WORKLOADS[given.workload]), **given.numbers}
    if given.context == LONGEST:
        numbers["context"] = numbers["prompt_tokens"] + numbers["output_tokens"]
    try:
        return Workload(**numbers)
    except ValidationError as error:
        wrong = explain(error)
        told = (f"--{where.replace('_', '-')}: {why}" if where else why for where, why in wrong)
        raise InputError("; ".join(told)) from None


def open_plan(
    path: Path, model: str | None, *, trust_remote_code: bool = False
) -> tuple[Plan, Model]:
    """Read a plan, and the headers of its model: there, or where ``model`` says instead.

    ``trust_remote_code`` lets code of the checkpoint run.

    A plan that was edited is priced again, which is noted, and not written to its file.
    """
    plan = load_plan(path)
    progress = ProgressBar("reading headers")
    found = open_planned_model(plan, model, progress, trust_remote_code=trust_remote_code)
    priced = price_again(plan, found)
    if changes := list_changes(plan, priced):
        why = "was edited, or made by another version, and is priced again"
        print_note(f"{path} {why}: {'; '.join(changes)}")
    return priced, found


def open_plan_to_run(
    path: Path,
    model: str | None,
    goal: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Plan, Model]:
    """Do what ``open_plan`` does, with the prediction that offplan's own runtime has.

    ``goal`` are fields of ``Goal`` that take the place of the plan's, where they are true.
    ``trust_remote_code`` lets code of the checkpoint run.

    Raises PlanError for a plan of several GPUs.
    """
    plan, found = open_plan(path, model, trust_remote_code=trust_remote_code)
    plan.require_one_gpu()
    own = price_as_run(plan, found, goal)
    if own.goal.way != plan.goal.way:
        print_note(f"{path} is for other passes: predicted and run by {own.goal.way.whose}")
    elif own is not plan:
        print_note(f"{path} is for {plan.goal.engine}: predicted and run by offplan's own runtime")
    return own, found


def price_asked(path: Path, plan: Plan, question: Question) -> Plan:
    """Price a plan on its question's machine, and note where its file says otherwise."""
    priced = price_on(plan, question.model, question.planned_machine)
    if changes := list_changes(plan, priced):
        print_note(f"{path} says otherwise: {'; '.join(changes)} here")
    return priced


def save_plan(path: Path, plan: Plan, *, force: bool) -> None:
    """Write a plan's file, in which relative paths start at the file's own folder, and say so."""
    moved = relocate_plan(plan, Path(), path.resolve().parent)
    save_file(path, dump_plan(moved), force=force)


def relocate_plan(plan: Plan, old: Path, new: Path) -> Plan:
    """Return a plan whose relative paths start at the folder ``new`` instead of ``old``."""
    model, machine = plan.model, plan.machine
    source, profile = model.source, machine.profile
    if model.revision is None:
        source = relocate_path(source, old, new)
    if profile is not None:
        profile = relocate_profile(profile, old, new)
    moved: dict[str, Record] = {
        "model": model.model_copy(update={"source": source}),
        "machine": machine.model_copy(update={"profile": profile}),
    }
    for key in ("routing", "acceptance"):
        if (profile_ref := getattr(plan, key)) is not None:
            file = relocate_path(profile_ref.file, old, new)
            moved[key] = profile_ref.model_copy(update={"file": file})
    return plan.model_copy(update=moved)


def relocate_profile(named: str, old: Path, new: Path) -> str:
    """Return the name of a machine from the folder ``new``: a file's path moves, others stay."""
    return str(parse_name(named).move(lambda path: relocate_path(path, old, new)))


def relocate_path(named: str, old: Path, new: Path) -> str:
    """Return from the folder ``new`` what is a relative path from ``old``; other names stay."""
    path, folders = os.path.join(old, named), [os.path.realpath(each) for each in (old, new)]
    if os.path.isabs(named) or not os.path.exists(path) or folders[0] == folders[1]:
        return named
    return os.path.relpath(os.path.join(folders[0], named), folders[1])


def settle_context(
    ask: Callable[[Workload], Question], workload: Workload, context: int | None
) -> Question:
    """Ask with a context, where it is LONGEST with the longest that fits, and note which it is.

    ``workload`` has the context, or the shortest one in place of LONGEST. A context that is more
    than the model was trained for is noted, too.
    """
    question = ask(workload)
    architecture = question.model.architecture
    trained = architecture.trained_context
    if context != LONGEST:
        context = question.workload.context
        if trained is not None and context > trained:
            print_note(
                f"a context of {context} tokens is more than the {trained} that the model was "
                f"trained for: text beyond them may make no sense (--context {trained} ends there)"
            )
        return question

    def ask_for(tokens: int) -> Question:
        # the passes that run a model may be others for longer texts
        return ask(workload.model_copy(update={"context": tokens}))

    longest = find_longest_context(ask_for(most_context(question)))
    if longest is None:  # the planner says by how much
        return question
    limit = "all that the model was trained for" if longest == trained else "the most that fit"
    if question.goal.engine is not None and longest == architecture.engine_context:
        limit = f"all that {question.goal.engine} serves"
    elif longest != trained and question.goal.objective == "throughput":
        limit = "the most that fit for one sequence"
    print_note(f"--context max: {longest} tokens, {limit}")
    return ask_for(longest)


def note_machine(
    name: str | None, goal: Goal, store: StoreName, model: Model, machine: MachineProfile
) -> None:
    """Note what is assumed of a named machine, where a goal's GPUs are planned for.

    Raises InputError if more are planned for than the name says.
    """
    named = parse_name(name or "")
    if named.assumed:
        print_note(f"{named.assumed} is assumed: --machine {name} names no lanes of the link")
    there, num_gpus = named.num_gpus, goal.num_gpus
    if there == 1:
        return
    if num_gpus > there:
        raise InputError(
            f"--machine {name}: found {there} GPUs, expected {num_gpus}, as --tp and --pp ask for; "
            "name as many, or ask for fewer"
        )
    if num_gpus == 1 and store == "host":
        is_vllm = (goal.engine or "").startswith("vllm")
        most = 2 ** (there.bit_length() - 1)  # numbers of heads divide by powers of two
        vllm = f"{'' if is_vllm else '--for vllm '}--tp {most}"
        room, size = most * machine.gpu_memory.value, model.total_bytes
        told = f"These {most} have {format_bytes(room)}, the model {format_bytes(size)}"
        told += f": add {vllm}" if size < room else f", so with {vllm} it may be slower than here"
        print_note(
            f"this plans for one of {there} GPUs, as `offplan run` computes on one. "
            f"{name_options(SECOND_GPU_STORES)}. "
            f"vLLM divides a model over {most}, which is fast where they hold all of it. {told}"
        )
    elif num_gpus > 1 and num_gpus < there:
        print_note(f"this plans for {num_gpus} of {there} GPUs")


def note_budget(machine: MachineProfile, gpu_memory: int | None) -> None:
    """Say so where a machine has less GPU memory than the bytes that were named."""
    most = machine.gpu_memory.value
    if gpu_memory is not None and gpu_memory > most:
        print_note(
            f"{machine.name} has {format_bytes(most)}: planning for that instead of "
            f"{format_budget(gpu_memory)}"
        )
