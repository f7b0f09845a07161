"""What commands have in common: plans and values read from options, and what is noted of them."""

import os
from pathlib import Path

from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.cli.output import ProgressBar, print_note, write_file
from offplan.errors import InputError
from offplan.machine.name import parse_name
from offplan.plan import Plan, Workload, dump_plan, load_plan
from offplan.planned import open_planned_model
from offplan.question import Question
from offplan.records import explain
from offplan.repricing import list_changes, price_again
from offplan.units import format_bytes, format_bytes_exact


def read_workload(batch: int, prompt_tokens: int, output_tokens: int, context: int) -> Workload:
    """Check the workload; raises InputError where it contradicts itself."""
    try:
        return Workload(
            batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, context=context
        )
    except ValidationError as error:
        wrong = explain(error)
        told = (f"--{where.replace('_', '-')}: {why}" if where else why for where, why in wrong)
        raise InputError("; ".join(told)) from None


def open_plan(path: Path, model: str | None) -> tuple[Plan, Model]:
    """Read a plan, and the headers of its model: there, or where ``model`` says instead.

    A plan that was edited is priced again, which is noted, and not written to its file.
    """
    plan = load_plan(path)
    found = open_planned_model(plan, model, ProgressBar("reading headers"))
    priced = price_again(plan, found)
    if changes := list_changes(plan, priced):
        why = "was edited, or made by another version, and is priced again"
        print_note(f"{path} {why}: {'; '.join(changes)}")
    return priced, found


def save_plan(path: Path, plan: Plan, *, force: bool) -> None:
    """Write a plan's file, in which relative paths start at the file's own folder."""
    folder = os.path.realpath(path.parent)

    def relocate(named: str) -> str:
        is_path = os.path.exists(named) and not os.path.isabs(named)
        return os.path.relpath(named, folder) if is_path and folder != os.getcwd() else named

    model, machine = plan.model, plan.machine
    source, profile = model.source, machine.profile
    if model.revision is None:
        source = relocate(source)
    if profile is not None:
        profile = str(parse_name(profile).move(relocate))
    moved = {
        "model": model.model_copy(update={"source": source}),
        "machine": machine.model_copy(update={"profile": profile}),
    }
    write_file(path, dump_plan(plan.model_copy(update=moved)), force=force)


def note_budget(question: Question, gpu_memory: int | None) -> None:
    """Say so where the question's machine has less GPU memory than the bytes that were named."""
    most = question.machine.gpu_memory.value
    if gpu_memory is not None and gpu_memory > most:
        print_note(
            f"{question.machine.name} has {format_bytes(most)}: planning for that instead of "
            f"{format_bytes_exact(gpu_memory)}"
        )
