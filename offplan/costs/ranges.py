"""Ranges of the times of passes whose layers nobody has timed."""

from collections.abc import Mapping
from typing import NamedTuple

from offplan.placement import Phase
from offplan.plan import Offload, Prediction


class Errors(NamedTuple):
    """Measured times as multiples of those estimated, the least and the most."""

    least: float
    most: float


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
CORES_ERRORS = Errors(0.65, 1.5)
"""Errors of the time that compute waits for the host's cores, and what else it waits for.

Source: a step of Qwen3-30B on that H100, where their rate was assumed, waited 0.66 of what was
predicted. One of gpt-oss-20b on an H200, where it was measured, waited 1.5 times that.
"""


def step_range(
    prediction: Prediction, offload: Offload, phase: Phase
) -> tuple[float, float] | None:
    """Return the least and the most seconds of a pass; None if its layers were timed."""
    if prediction.basis == "measured":
        return None
    is_step = phase is Phase.DECODE
    took = prediction.decode if is_step else prediction.prefill
    waits = is_step and any(rule.decode.is_by_cores for rule in offload.rules)
    pairs = zip(COMPUTE_ERRORS[phase], CORES_ERRORS if waits else WAITING_ERRORS, strict=True)
    waiting_s = min(took.stall_s, took.step_s)
    low, high = ((took.step_s - waiting_s) * a + waiting_s * b for a, b in pairs)
    return low, high
