"""Other questions that may have a better answer: checkpoints of fewer bits, a shorter context."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from offplan.checkpoint.requantise import requantise
from offplan.disk_cache import KeptAnswers, installed_versions
from offplan.engines.runner import lower
from offplan.errors import InfeasibleError, PlanError
from offplan.held.held import hold_counted
from offplan.plan import Plan
from offplan.planner.longest import find_longest_context
from offplan.planner.make import try_plan
from offplan.planner.question import Question

WORTH_TELLING = 1.5
"""Times by which tokens come faster, so that an alternative is reported. Source: chosen."""
_MAX_BYTES = 2**12
_FEWEST_BITS = 4


@dataclass(frozen=True)
class Alternative:
    """The plan of another checkpoint of the model."""

    bits: int
    """Bits of a weight in the layers: 8 (FP8) or 4 (whole numbers in groups)."""
    total_bytes: int
    """Bytes of the checkpoint as stored, sized from names and shapes."""
    tokens_per_s: float
    """Tokens a second of all sequences of the batch."""
    first_token_s: float
    host_bytes: int
    """Bytes of weights on the host."""


def has_alternatives(question: Question) -> bool:
    """Return True for a question of which other checkpoints are tried."""
    goal = question.goal
    is_usual = goal.engine is None and not goal.targets and goal.objective == "latency"
    return is_usual and not question.machine.is_cpu


def find_alternatives(question: Question, plan: Plan | None) -> tuple[Alternative, ...]:
    """Find what checkpoints of 8 and 4 bits give where that is WORTH_TELLING times faster.

    If ``plan``, the answer, is None, every one that fits is found. An engine's plans, targets and
    the CPU have none. The disk cache keeps the result.
    """
    if not has_alternatives(question):
        return ()
    key = {**question.key, **installed_versions()}
    found = _KEPT.find(key)
    if found is None:
        found = tuple(_plan_each(question))
        _KEPT.keep(key, found)
    least = 0.0 if plan is None else WORTH_TELLING * tokens_per_s(plan)
    return tuple(each for each in found if each.tokens_per_s >= least)


@dataclass(frozen=True)
class TooLarge:
    """Another checkpoint of the model, for which the host's memory is too small, too."""

    bits: int
    total_bytes: int
    """Bytes of the checkpoint as stored, sized from names and shapes."""
    ram_bytes: int
    """Memory of a machine on which it has a plan."""


def find_too_large(question: Question) -> TooLarge | None:
    """Find the memory that a checkpoint of 4 bits needs, where not even that fits; None for others.

    Engines' plans, targets and the CPU have none, as none in ``find_alternatives``.
    """
    other = _requantise(question, _FEWEST_BITS) if has_alternatives(question) else None
    if other is None:
        return None
    try:
        try_plan(other)
    except InfeasibleError as error:
        if error.ram_bytes is not None:
            return TooLarge(_FEWEST_BITS, other.model.total_bytes, error.ram_bytes)
    except PlanError:
        pass
    return None


def find_shorter_context(question: Question) -> int | None:
    """Find the longest context that fits where a question's own does not, None if none does.

    The disk cache keeps the result. A question with another goal, as one of a smaller cache, has
    another result: ``replace(question, stages=lower(model, goal), goal=goal)``.
    """
    key = {**question.key, **installed_versions()}
    found = _LONGEST.find(key)
    if found is None:
        found = find_longest_context(question, question.workload.context) or 0
        _LONGEST.keep(key, found)
    return found or None


def tokens_per_s(plan: Plan) -> float:
    """Return the tokens a second of all sequences of a plan's batch."""
    prediction = plan.prediction
    step_s = prediction.decode.step_s if plan.workload.num_steps else prediction.prefill.step_s
    return plan.workload.batch / step_s


def _requantise(question: Question, bits: int) -> Question | None:
    """Ask the question of the model's checkpoint of so many bits; None if they are not fewer."""
    model = requantise(question.model, bits)
    if model is None:
        return None
    goal = question.goal.for_other_weights()
    passes = question.stage.passes
    if passes is None:
        stages = lower(model, goal)
    else:  # its own differ little, and take long to count
        stages = (hold_counted(model, goal.way, replace(passes, pinned=())),)
    acceptance = question.stage.acceptance  # of drafts, which rounded weights take alike
    stages = tuple(replace(each, acceptance=acceptance) for each in stages)
    return replace(question, stages=stages, goal=goal)


def _plan_each(question: Question) -> Iterator[Alternative]:
    for bits in (8, _FEWEST_BITS):
        other = _requantise(question, bits)
        if other is None:
            continue
        try:
            plan = try_plan(other).plan
        except (InfeasibleError, PlanError):
            continue
        yield Alternative(
            bits,
            other.model.total_bytes,
            tokens_per_s(plan),
            plan.prediction.prefill.step_s,
            plan.prediction.host_memory_bytes,
        )


def _encode(found: tuple[Alternative, ...]) -> bytes:
    return json.dumps({"found": [asdict(each) for each in found]}).encode()


def _decode(content: bytes) -> tuple[Alternative, ...]:
    return tuple(Alternative(**each) for each in json.loads(content)["found"])


_KEPT = KeptAnswers("alternatives", _MAX_BYTES, _encode, _decode)


def _encode_longest(tokens: int) -> bytes:
    return json.dumps({"longest": tokens}).encode()


def _decode_longest(content: bytes) -> int:
    tokens = json.loads(content)["longest"]
    if type(tokens) is not int or tokens < 0:
        raise ValueError("no number of tokens is written so")
    return tokens


_LONGEST = KeptAnswers("longest_context", _MAX_BYTES, _encode_longest, _decode_longest)
"""Tokens of the longest context that fits, by question; 0 where none does."""
