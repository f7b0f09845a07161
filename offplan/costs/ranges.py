"""Ranges of the times of passes whose layers nobody has timed."""

from collections.abc import Mapping

from offplan.costs.capabilities import WAIT_ERRORS
from offplan.costs.term import Errors
from offplan.placement import Phase
from offplan.plan import Offload, Prediction

COMPUTE_ERRORS: Mapping[Phase, Errors] = {
    Phase.DECODE: Errors(0.85, 1.3),
    Phase.PREFILL: Errors(0.85, 1.4),
}
"""Errors of estimated compute.

Source: ``costs.kernels`` was fitted to an H200. Resident steps of 8 models took 0.92 to 1.28 of
their estimates there, and of 3 models 0.95 to 1.06 on an H100, which it was not fitted to. Prompts
took 0.88 to 1.37, and 0.91 to 0.98 on an H100. Both have one chip, so ranges are the wider ones.
"""
WAITING_ERRORS = Errors(0.9, 1.15)
"""Errors of the time that compute waits for copies and reads in place.

Source: plans on an H100 by a profile that was not measured there. Steps and first tokens of
gpt-oss-20b and Qwen3-8B in FP8 took 0.92 to 1.08 of what was predicted.
"""


def step_range(
    prediction: Prediction, offload: Offload, phase: Phase
) -> tuple[float, float] | None:
    """Return the least and the most seconds of a pass; None if its layers were timed.

    Layers of other models that were timed narrow it.
    """
    if prediction.basis == "measured":
        return None
    is_step = phase is Phase.DECODE
    took = prediction.decode if is_step else prediction.prefill
    used = {name for rule in offload.rules if is_step for name in rule.list_capabilities()}
    errors = [WAITING_ERRORS, *(WAIT_ERRORS[name] for name in used & WAIT_ERRORS.keys())]
    widest = min(each.least for each in errors), max(each.most for each in errors)
    known = took.correction
    computing = COMPUTE_ERRORS[phase] if known is None else Errors(known.least, known.most)
    pairs = zip(computing, widest, strict=True)
    waiting_s = min(took.stall_s, took.step_s)
    low, high = ((took.step_s - waiting_s) * a + waiting_s * b for a, b in pairs)
    return low, high
