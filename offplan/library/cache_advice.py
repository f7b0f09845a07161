"""A smaller KV cache, in FP8 or of a shorter context: reported where it gives a better plan."""

from dataclasses import dataclass, replace

from offplan.engines.runner import lower
from offplan.errors import OffplanError
from offplan.library.alternatives import find_shorter_context, tokens_per_s
from offplan.library.runnable import why_not_run
from offplan.plan import Plan
from offplan.planner.make import try_plan
from offplan.planner.question import Question
from offplan.refusals import list_coded_refusals

WORTH_TELLING = 1.1
"""Times by which tokens come faster, so that a cache in FP8 is reported. Source: chosen."""


@dataclass(frozen=True)
class CacheAdvice:
    """The plan of the same question with a KV cache in FP8."""

    cache_bytes: int
    """Bytes of the KV cache."""
    tokens_per_s: float
    """Tokens a second of all sequences of the batch."""
    first_token_s: float
    host_bytes: int
    """Bytes of weights on the host."""


@dataclass(frozen=True)
class ContextAdvice:
    """The plan of the same question with a shorter context."""

    context: int
    """Tokens that a sequence may reach."""
    tokens_per_s: float
    """Tokens a second of all sequences of the batch."""
    first_token_s: float
    host_bytes: int
    """Bytes of weights on the host."""


def advise_context(question: Question, plan: Plan) -> ContextAdvice | None:
    """Find what a quarter of the context gives, where that is WORTH_TELLING times faster.

    The workload's own tokens fit in any case. None for engines, targets, the CPU, and for a plan
    that offloads nothing.
    """
    work = question.workload
    shorter = max(work.prompt_tokens + work.output_tokens, work.context // 4)
    if not _is_usual(question) or not plan.offload.rules or shorter >= work.context:
        return None
    other = question.with_workload(context=shorter)
    saved = question.stage.cache_bytes(work) - question.stage.cache_bytes(other.workload)
    if not _may_help(question, plan, saved):
        return None
    try:
        found = try_plan(other).plan
    except OffplanError:
        return None
    if tokens_per_s(found) < WORTH_TELLING * tokens_per_s(plan):
        return None
    prediction = found.prediction
    host_bytes = prediction.host_memory_bytes
    return ContextAdvice(shorter, tokens_per_s(found), prediction.prefill.step_s, host_bytes)


def _is_usual(question: Question) -> bool:
    goal = question.goal
    return (
        goal.is_own
        and not goal.targets
        and goal.objective == "latency"
        and (not question.machine.is_cpu)
    )


def advise_cache(question: Question, plan: Plan | None) -> CacheAdvice | None:
    """Find what a KV cache in FP8 gives, where that is WORTH_TELLING times faster.

    If ``plan``, the answer, is None, any plan that fits is found. None for engines, targets, the
    CPU, and where the cache cannot be kept so.
    """
    coded = ask_coded(question) if _is_usual(question) else None
    if coded is None:
        return None
    work = question.workload
    saved = question.stage.cache_bytes(work) - coded.stages[0].cache_bytes(work)
    if plan is not None and not _may_help(question, plan, saved):
        return None
    try:
        found = try_plan(coded).plan
    except OffplanError:
        return None
    if plan is not None and tokens_per_s(found) < WORTH_TELLING * tokens_per_s(plan):
        return None
    if not _runs(coded):
        return None
    prediction = found.prediction
    return CacheAdvice(
        prediction.gpu_memory.kv_cache_bytes,
        tokens_per_s(found),
        prediction.prefill.step_s,
        prediction.host_memory_bytes,
    )


def find_longest_coded(question: Question, longest: int | None) -> int | None:
    """Find the longest context that fits with a KV cache in FP8.

    ``longest`` is the longest without; None if that is as long, or the cache cannot be kept so.
    The disk cache keeps the result.
    """
    coded, work = ask_coded(question), question.workload
    if coded is None or coded.stage.cache_bytes(work) >= question.stage.cache_bytes(work):
        return None
    found = find_shorter_context(coded) or 0
    return found if found > (longest or 0) and _runs(coded) else None


def ask_coded(question: Question) -> Question | None:
    """Ask the same with a KV cache in FP8; None if it is one, or the cache cannot be kept so."""
    goal = question.goal.model_copy(update={"kv_cache_dtype": "fp8"})
    if goal == question.goal:
        return None
    try:
        coded = replace(question, goal=goal)
        stages = lower(question.model, goal)
    except OffplanError:
        return None
    if goal.is_own and not question.machine.is_cpu and any(list_coded_refusals(stages[0])):
        return None
    held = question.stage
    stages = tuple(
        replace(each, routing=held.routing, acceptance=held.acceptance) for each in stages
    )
    return replace(coded, stages=stages)


def _runs(coded: Question) -> bool:
    """Return True if ``run`` can execute what is advised, which transformers' class decides.

    Texts are no longer than those of the question without codes.
    """
    return why_not_run(coded.stages[0], on_gpu=not coded.machine.is_cpu) is None


def _may_help(question: Question, plan: Plan, saved: int) -> bool:
    """Return True if bytes saved of the KV cache could make a step so much faster.

    Each byte of memory saves one over the link or by the host's cores at most, and each cached byte
    one of GPU memory. Planning takes a second, and most caches are small beside the weights.
    """
    machine = question.planned_machine
    rates = [machine.h2d, machine.uva]
    rates += [machine.cores_rate_beside] if plan.goal.more_backends else []
    slowest = min(rate.value for rate in rates)
    step_s = plan.prediction.decode.step_s
    most_s = saved * (bool(plan.offload.rules) / slowest + 1 / machine.hbm.value)
    return step_s >= WORTH_TELLING * (step_s - most_s)
