"""Prompts that read weights over the link again and again, and what would have them read once."""

from collections.abc import Callable
from dataclasses import dataclass

from offplan.costs.link import rows_bytes
from offplan.costs.predict import predict
from offplan.costs.threshold import least_that
from offplan.costs.work import prefill_shapes
from offplan.held.held import Held
from offplan.placement import place
from offplan.plan import Budget, Offload, Plan, Prediction, Workload
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space

WORTH_TELLING = 2.0
"""Times that a prompt has to read what lies in the store. Source: chosen."""
WAITS = 0.1
"""Share of the prompt's time that it has to wait for the link. Source: chosen."""
ONCE = 1.5
"""What reads fewer times reads once, rounded."""
MEMORY_RESOLUTION = 20
"""The memory that would do is found to this part of the budget; the budget again is the most."""
CONTEXT_RESOLUTION = 8
"""The context that would do is found to this part of what it may lack."""
MOST_HALVINGS = 6
"""Smaller batches than this many halves of the question's are not tried."""


@dataclass(frozen=True)
class Rereads:
    """A prompt that reads weights over the link again and again, and what would do with once."""

    num_reads: float
    """Bytes of weights that the prompt brings over the link, over those in the store."""
    batch: int | None
    """A smaller batch whose plan reads them once; None where none was found."""
    context: int | None
    """A shorter context whose plan reads them once."""
    more_gpu_bytes: int | None
    """GPU memory beyond the budget with which the plan reads them once."""


def find_rereads(question: Question, plan: Plan) -> Rereads | None:
    """Find how often the prompt of a question's plan reads weights, and what would have it be once.

    None for a prompt that reads them at most twice, or that hardly waits for them. At most 16 plans
    are searched; each remedy is one that the planner's own plan for it bears out.
    """
    prefill = plan.prediction.prefill
    if prefill.stall_s <= WAITS * prefill.step_s or not plan.offload.rules:
        return None
    held = question.held.pack(plan.offload.packing)
    num_reads = _count_reads(held, plan.workload, plan.offload, plan.prediction)
    if num_reads <= WORTH_TELLING:
        return None
    if question.goal.objective != "latency":  # which chooses the batch
        return Rereads(num_reads, None, None, None)
    remedies = _find_batch(question), _find_context(question), _find_memory(question)
    return Rereads(num_reads, *remedies)


def _count_reads(held: Held, workload: Workload, offload: Offload, prediction: Prediction) -> float:
    """Divide what a prompt brings over the link by what lies in the store, embeddings left out."""
    placements = [place(stage, offload) for stage in held.stages]
    shapes = prefill_shapes(workload, offload.prefill_chunk)
    of_rows = sum(rows_bytes(each.host_tables, shapes) for each in placements)
    stored_bytes = sum(each.slab_bytes for each in placements)
    return (prediction.prefill.link_bytes - of_rows) / stored_bytes if stored_bytes else 0.0


def _reads_once(searcher: Searcher, budget: Budget) -> bool:
    """Whether the prompt of a budget's plan reads weights once."""
    question = searcher.space.question
    best = find_best(searcher, budget, searcher.fastest).best
    if best is None:
        return False
    held, workload = searcher.hold(best.offload), question.workload
    prediction = predict(held, searcher.space.machine, workload, budget, best.offload)
    return _count_reads(held, workload, best.offload, prediction) < ONCE


def _find_batch(question: Question) -> int | None:
    """Find the largest half, quarter and so on of the batch that reads once."""
    halves = (question.workload.batch >> number for number in range(1, MOST_HALVINGS + 1))
    reads_once = _asks_with(question, "batch")
    return next((batch for batch in halves if batch and reads_once(batch)), None)


def _find_context(question: Question) -> int | None:
    """Find a context that reads once, hardly shorter than it has to be."""
    workload = question.workload
    most = workload.context - workload.prompt_tokens - workload.output_tokens
    reads_once = _asks_with(question, "context")
    less = _find_least(
        lambda less: reads_once(workload.context - less), most, most // CONTEXT_RESOLUTION
    )
    return None if less is None else workload.context - less


def _find_memory(question: Question) -> int | None:
    """Find how much more GPU memory reads once, be it more than the machine has."""
    budget, searcher = question.budget, Searcher(Space(question))

    def reads_once(more: int) -> bool:
        memory = budget.gpu_memory + more
        return _reads_once(searcher, budget.model_copy(update={"gpu_memory": memory}))

    return _find_least(reads_once, budget.gpu_memory, budget.gpu_memory // MEMORY_RESOLUTION)


def _find_least(holds: Callable[[int], bool], most: int, step: int) -> int | None:
    """Find a number that holds, from 1 to ``most``, by halving; None where ``most`` does not."""
    return least_that(holds, 0, most, step) if most > 0 and holds(most) else None


def _asks_with(question: Question, name: str) -> Callable[[int], bool]:
    """Return whether a prompt reads once for another number of what is named in the workload."""

    def reads_once(number: int) -> bool:
        asked = question.with_workload(**{name: number})
        return _reads_once(Searcher(Space(asked)), asked.budget)

    return reads_once
