"""Findings in a plan's figures, held against each other: no headers and no profile are needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offplan.costs.memory import MARGIN
from offplan.plan import PRINTED_TO, PhasePrediction, Plan
from offplan.stores import HOST, STORES
from offplan.units import format_bytes, format_seconds


def list_contradictions(plan: Plan) -> tuple[str, ...]:
    """List what of a plan's prediction contradicts its other figures, its workload or its decision.

    Printed figures are rounded to four digits: what that may explain is no contradiction.
    """
    return (*_of_memory(plan), *_of_times(plan), *_of_decision(plan))


def _of_memory(plan: Plan) -> Iterator[str]:
    memory = plan.prediction.gpu_memory
    terms = {
        "resident": memory.resident_bytes,
        "ring": memory.ring_bytes,
        "kv_cache": memory.kv_cache_bytes,
        "activations": memory.activation_bytes,
        "overhead": memory.overhead_bytes,
    }
    if _differ(total := sum(terms.values()), memory.total_bytes):
        yield (
            f"gpu_memory.total is {format_bytes(memory.total_bytes)}, and its terms add up to "
            f"{format_bytes(total)}"
        )
    margin = round(MARGIN * plan.budget.gpu_memory)
    if _exceeds(margin, memory.overhead_bytes):
        yield (
            f"gpu_memory.overhead is {format_bytes(memory.overhead_bytes)}, and the margin of the "
            f"budget alone is {format_bytes(margin)}"
        )


def _of_times(plan: Plan) -> Iterator[str]:
    predicted, goal = plan.prediction, plan.goal
    phases = {"prefill": predicted.prefill, "decode": predicted.decode}
    for name, phase in phases.items():
        yield from (f"{name}.{told}" for told in _of_phase(phase, plan))
    num_steps = plan.workload.num_steps
    request_s = predicted.prefill.step_s + num_steps * predicted.decode.step_s
    if _differ(request_s, predicted.objective_s):
        yield (
            f"objective is {format_seconds(predicted.objective_s)}, and the prompt and {num_steps} "
            f"steps take {format_seconds(request_s)}"
        )
    for (name, phase), most in zip(phases.items(), (goal.max_ttft_s, goal.max_tpot_s), strict=True):
        if most is not None and _exceeds(phase.step_s, most):
            yield (
                f"{name}.step is {format_seconds(phase.step_s)}, and the goal is "
                f"{format_seconds(most)} at most"
            )


def _of_phase(phase: PhasePrediction, plan: Plan) -> Iterator[str]:
    step, compute, link = phase.step_s, phase.compute_s, phase.link_s
    if _differ(compute + phase.stall_s, step):
        yield (
            f"step is {format_seconds(step)}, and compute and stall add up to "
            f"{format_seconds(compute + phase.stall_s)}"
        )
    if _exceeds(phase.bound_s, step):
        yield f"bound is {format_seconds(phase.bound_s)}, more than the step"
    if _exceeds(compute, phase.bound_s) or _exceeds(phase.bound_s, max(compute, link)):
        yield (
            f"bound is {format_seconds(phase.bound_s)}, and no less than compute and no more than "
            f"{format_seconds(max(compute, link))}, the larger of compute and link, is expected"
        )
    least = phase.link_bytes / max(plan.machine.h2d, plan.machine.uva)
    if _exceeds(least, link):
        yield (
            f"link is {format_seconds(link)}, and {format_bytes(phase.link_bytes)} take "
            f"{format_seconds(least)} at the machine's rates"
        )


def _of_decision(plan: Plan) -> Iterator[str]:
    offload, predicted = plan.offload, plan.prediction
    streams = any(any(rule.streams) for rule in offload.rules)
    takes = bool(offload.rules)
    used = {STORES[offload.store]} if takes else set()
    drafts_on_host = offload.draft is not None and offload.draft.experts == "host"
    if offload.embeddings == "host" or drafts_on_host:
        used.add(HOST)
    expected = [("gpu_memory.ring", predicted.gpu_memory.ring_bytes, streams)]
    for store in STORES.values():
        expected.append((store.memory, predicted.bytes_in(store), store in used))
    for name, num_bytes, is_taken in expected:
        if is_taken != (num_bytes > 0):
            some = "some" if is_taken else "none"
            yield f"{name} is {format_bytes(num_bytes)}, and the decision takes {some}"
    if not takes and HOST not in used:
        phases = (predicted.prefill, predicted.decode)
        if any(phase.link_bytes or phase.link_s for phase in phases):
            yield "link and link_bytes are more than 0, and the decision offloads nothing"


def _differ(one: float, other: float) -> bool:
    """Return True if two figures differ by more than printing explains."""
    return abs(one - other) > PRINTED_TO * max(one, other)


def _exceeds(one: float, most: float) -> bool:
    """Return True if a figure exceeds its most by more than printing explains."""
    return one > most * (1 + PRINTED_TO)


Verdict = Literal["holds", "drift", "infeasible", "refused", "unknown", "error"]
"""A fact is as the plan has it, differs, lacks memory, is refused by its runtime, could not be
compared, or could not be read."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    subject: str
    verdict: Verdict
    text: str
    """Words for people: what was found, and what to do about it."""
