"""What commands that plan have in common: values read from options, and what is noted of them."""

from typing import TYPE_CHECKING

from offplan.cli.output import print_note
from offplan.errors import InputError
from offplan.units import format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from offplan.plan import Workload
    from offplan.question import Question


def read_workload(batch: int, prompt_tokens: int, output_tokens: int, context: int) -> "Workload":
    """Check the workload; raises InputError where it contradicts itself."""
    from pydantic import ValidationError

    from offplan.plan import Workload
    from offplan.records import explain

    try:
        return Workload(
            batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, context=context
        )
    except ValidationError as error:
        where, why = explain(error)
        raise InputError(f"--{where.replace('_', '-')}: {why}" if where else why) from None


def read_size(text: str | None) -> int | None:
    """Read a size in bytes, None where the option was left out; raises InputError."""
    return None if text is None else parse_bytes(text)


def read_time(text: str | None) -> float | None:
    """Read a time in seconds, None where the option was left out; raises InputError."""
    return None if text is None else parse_seconds(text)


def note_budget(question: "Question", gpu_memory: int | None) -> None:
    """Say so where the question's machine has less GPU memory than the bytes that were named."""
    most = question.machine.gpu_memory.value
    if gpu_memory is not None and gpu_memory > most:
        print_note(
            f"{question.machine.name} has {format_bytes(most)}: planning for that instead of "
            f"{format_bytes(gpu_memory)}"
        )
