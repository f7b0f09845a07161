"""What commands have in common: plans and values read from options, and what is noted of them."""

from pathlib import Path

from pydantic import ValidationError

from offplan.checkpoint.model import Model
from offplan.cli.output import ProgressBar, print_note
from offplan.errors import InputError
from offplan.plan import Plan, Workload, load_plan
from offplan.planned import open_planned_model
from offplan.question import Question
from offplan.records import explain
from offplan.units import format_bytes


def read_workload(batch: int, prompt_tokens: int, output_tokens: int, context: int) -> Workload:
    """Check the workload; raises InputError where it contradicts itself."""
    try:
        return Workload(
            batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, context=context
        )
    except ValidationError as error:
        where, why = explain(error)
        raise InputError(f"--{where.replace('_', '-')}: {why}" if where else why) from None


def open_plan(path: Path, model: str | None) -> tuple[Plan, Model]:
    """Read a plan, and the headers of its model: there, or where ``model`` says instead."""
    plan = load_plan(path)
    return plan, open_planned_model(plan, model, ProgressBar("reading headers"))


def note_budget(question: Question, gpu_memory: int | None) -> None:
    """Say so where the question's machine has less GPU memory than the bytes that were named."""
    most = question.machine.gpu_memory.value
    if gpu_memory is not None and gpu_memory > most:
        print_note(
            f"{question.machine.name} has {format_bytes(most)}: planning for that instead of "
            f"{format_bytes(gpu_memory)}"
        )
