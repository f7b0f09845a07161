"""The neighbours of a plan: one step of each of its knobs, and what that costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from offplan.backends import Backend
from offplan.errors import ExportError, PlanError
from offplan.held.runner import Demand, Runner
from offplan.plan import Offload, Plan, Prediction, Rule
from offplan.planner.options import STEPS
from offplan.planner.question import Question
from offplan.planner.space import prefill_chunks
from offplan.units import format_bytes

MAX_BYTES_STEP = 16
"""A step of ``max_bytes`` is this part of it."""


@dataclass(frozen=True)
class Neighbour:
    """A plan that differs in one knob."""

    change: str
    """The knob and its step: ``prefetch_step 1 -> 2``."""
    prediction: Prediction
    refusal: str | None
    """Why the question does not allow it; None where it does."""


def find_neighbours(question: Question, plan: Plan) -> tuple[Neighbour, ...]:
    """Price each plan that is one step away from a decision, the fastest first.

    Steps that the model, the store or the engine does not allow are left out, those beyond budget
    and targets are not.
    """
    found = []
    for change, changes in _steps(question, plan.offload):
        try:
            offload = Offload.model_validate({**dict(plan.offload), **changes})
            prediction = question.predict(offload, plan.budget)
            demand = question.demand(offload)
        except (ValidationError, PlanError, ExportError):
            continue
        moved = plan.model_copy(update={"offload": offload, "prediction": prediction})
        found.append(Neighbour(change, prediction, _refuse(moved, demand)))
    return tuple(sorted(found, key=lambda each: (each.prediction.objective_s, each.change)))


def _steps(question: Question, offload: Offload) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the steps, and what of a decision each changes."""
    slots = offload.prefetch_step
    if any(any(rule.streams) for rule in offload.rules):
        for other in (slots - 1, slots + 1):
            yield f"prefetch_step {slots} -> {other}", {"prefetch_step": other}
    work = question.workload
    chunks = sorted({*prefill_chunks(work.prompt_tokens, work.batch), offload.prefill_chunk})
    at = chunks.index(offload.prefill_chunk)
    for chunk in (*chunks[max(0, at - 1) : at], *chunks[at + 1 : at + 2]):
        yield f"prefill_chunk {offload.prefill_chunk} -> {chunk}", {"prefill_chunk": chunk}
    runner = question.runner
    if runner.places_tables(question.model.tables):
        place = "device" if offload.embeddings == "host" else "host"
        yield f"embeddings {offload.embeddings} -> {place}", {"embeddings": place}
    yield from offload.list_steps()
    for number, rule in enumerate(offload.rules):
        others = offload.rules[:number], offload.rules[number + 1 :]
        name = f"rule {number + 1}"
        yield f"without {name}", {"rules": (*others[0], *others[1])}
        for step, changes in _rule_steps(rule, runner, question.backends):
            changed = {**dict(rule), **changes}
            yield f"{name}: {step}", {"rules": (*others[0], changed, *others[1])}


def _rule_steps(
    rule: Rule, runner: Runner, backends: Sequence[Backend]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the steps of a rule that a runner takes, and the keys that each changes."""
    if rule.max_bytes is not None:
        less, more = (rule.max_bytes * (MAX_BYTES_STEP + i) // MAX_BYTES_STEP for i in (-1, 1))
        unit = runner.max_bytes_unit
        for size in (less // unit * unit, -(-more // unit) * unit):
            told = f"max_bytes {format_bytes(rule.max_bytes)} -> {format_bytes(size)}"
            yield told, {"max_bytes": size}
        return
    yield from rule.list_pattern_steps()
    for list_steps in STEPS:
        yield from list_steps(rule)
    for phases in [("prefill", "decode")] if runner.takes_one_rule else [("prefill",), ("decode",)]:
        way: Backend = getattr(rule, phases[0])
        for other in backends:
            if other is not way:
                step = f"{' and '.join(phases)} {way.name} -> {other.name}"
                yield step, dict.fromkeys(phases, other)


def _refuse(plan: Plan, demand: Demand) -> str | None:
    """Say what of the question a plan does not keep; ``demand`` is what its runner takes."""
    goal, budget, prediction = plan.goal, plan.budget, plan.prediction
    gpu_bytes, stored_bytes = prediction.gpu_memory.total_bytes, plan.stored_bytes
    gpu_bytes += max(0, demand.more_gpu_bytes)
    stored_bytes = max(stored_bytes, demand.pinned_bytes)  # engines page-lock more than the plan's
    limits = (
        ("GPU memory", gpu_bytes, budget.gpu_memory),
        ("memory of the store", stored_bytes, budget.host_memory),
        ("--max-ttft", prediction.prefill.step_s, goal.max_ttft_s),
        ("--max-tpot", prediction.decode.step_s, goal.max_tpot_s),
    )
    return next((name for name, took, most in limits if most is not None and took > most), None)
