"""A benchmark's result as ``bench --json`` printed it, read again to be shown beside its plan."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from offplan.errors import InputError
from offplan.plan import PRINTED_TO, Offload, Plan
from offplan.records import Record, read_text
from offplan.units import format_seconds

OWN_RUNTIME = "offplan"
"""The runtime that benchmarks measure, beside the names of engines."""
_MOST_BYTES = 2**26
"""Beyond any result."""
_Number = Annotated[float, Field(ge=0)]


class _Part(Record):
    """A part of the result; what is not needed here is passed over."""

    model_config = ConfigDict(extra="ignore")


class RecordedWait(_Part):
    """Compute standing still for a layer's bytes."""

    layer: int
    start_s: _Number
    """Seconds from the beginning of the recording."""
    stop_s: _Number


class RecordedWaits(_Part):
    """The waits of compute during some passes, one after another."""

    num_passes: int
    seconds: _Number
    waits: tuple[RecordedWait, ...]


class PhaseFigures(_Part):
    """Figures of a phase (decode: one step; prefill: the whole prompt)."""

    step_s: _Number
    stall_s: _Number
    """Seconds that compute waited for the link."""
    link_bytes: _Number | None
    """Bytes over the link; null if nobody counted them."""
    recorded: RecordedWaits | None = None
    """Waits of compute; null if they were not measured."""


class Memory(_Part):
    """Memory that the process took."""

    total_bytes: _Number | None
    """Bytes on the card; null on the CPU."""


class Figures(_Part):
    """One side of the comparison."""

    decode: PhaseFigures
    prefill: PhaseFigures
    gpu_memory: Memory


class Ran(_Part):
    """The model and the decision that ran."""

    headers_sha256: str
    offload: Offload

    @classmethod
    def of(cls, plan: Plan) -> "Ran":
        """Return what runs by a plan."""
        return cls(headers_sha256=plan.model.headers_sha256, offload=plan.offload)


class Runtimes(_Part):
    """The runtime of each side: offplan's own, or an engine."""

    predicted: str
    measured: str


class BenchFile(_Part):
    """A result: what was predicted, what was measured, and where."""

    offplan: Literal[1]
    plan: Ran
    runtime: Runtimes
    device: str
    batch: int
    prompt_tokens: int
    predicted: Figures
    measured: Figures


def load_bench(path: Path, plan: Plan) -> BenchFile:
    """Read the result of a plan's benchmark.

    Raises InputError for a file that is none, and for a benchmark of another plan.
    """
    text = read_text(path, "result of bench --json", _MOST_BYTES, InputError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not what bench --json prints: {error}") from None
    found = BenchFile.check(data, str(path), "result of bench --json", InputError)
    if (difference := _find_difference(found, plan)) is not None:
        raise InputError(
            f"{path} is of another plan: {difference}: measure this one (offplan bench --json)"
        )
    return found


def _find_difference(found: BenchFile, plan: Plan) -> str | None:
    """Say what a benchmark has otherwise than a plan; None if it is of this plan."""
    if found.plan != Ran.of(plan):
        return "its model or its decision is another than this plan's"
    work = plan.workload
    if (found.batch, found.prompt_tokens) != (work.batch, work.prompt_tokens):
        return (
            f"it ran batch {found.batch} and {found.prompt_tokens} prompt tokens, this plan is for "
            f"{work.batch} and {work.prompt_tokens}"
        )
    # a benchmark is predicted as offplan's own runtime runs it, also of a plan for an engine
    is_comparable = found.runtime.predicted == (plan.goal.engine or OWN_RUNTIME)
    for phase in ("prefill", "decode") if is_comparable else ():
        took, ours = getattr(found.predicted, phase).step_s, getattr(plan.prediction, phase).step_s
        if abs(took - ours) > PRINTED_TO * ours:
            return (
                f"it was predicted {format_seconds(took)} for {phase}, this plan "
                f"{format_seconds(ours)}"
            )
    return None
