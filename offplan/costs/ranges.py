"""Ranges of the times of passes whose layers nobody has timed."""

from collections.abc import Mapping
from typing import NamedTuple

from offplan.placement import Phase
from offplan.plan import Prediction


class Errors(NamedTuple):
    """Measured times as multiples of those estimated, the least and the most."""

    least: float
    most: float


COMPUTE_ERRORS: Mapping[Phase, Errors] = {
    Phase.DECODE: Errors(0.85, 1.3),
    Phase.PREFILL: Errors(0.85, 1.4),
}
"""Errors of estimated compute.

Source: ``costs.kernels`` was fitted to an H200. Resident steps of 8 models took 0.86 to 1.28 of
their estimates there, and of 3 models 0.95 to 1.06 on an H100, which it was not fitted to. Prompts
took 0.88 to 1.37, and 0.91 to 0.98 on an H100. Both have one chip, so ranges are the wider ones.
"""
WAITING_ERRORS = Errors(0.8, 1.1)
"""Errors of the time that compute waits: for copies, reads in place and the host's cores.

Source: plans on an H100 by a profile that was not measured there. A step of Qwen3-30B with the
cores took 0.785 of its prediction, one of gpt-oss-20b without them 1.075.
"""


def step_range(prediction: Prediction, phase: Phase) -> tuple[float, float] | None:
    """Return the least and the most seconds of a pass; None if its layers were timed."""
    if prediction.basis == "measured":
        return None
    took = prediction.decode if phase is Phase.DECODE else prediction.prefill
    pairs = zip(COMPUTE_ERRORS[phase], WAITING_ERRORS, strict=True)
    waiting_s = min(took.stall_s, took.step_s)
    low, high = ((took.step_s - waiting_s) * a + waiting_s * b for a, b in pairs)
    return low, high
