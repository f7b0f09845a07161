"""Corrections of estimated layers by layers of other models that were timed on the machine."""

import statistics
from collections.abc import Iterable, Sequence
from functools import cache

from offplan.costs.kernels import estimate_layer
from offplan.costs.ranges import COMPUTE_ERRORS
from offplan.costs.term import Errors
from offplan.costs.work import Likeness, PassShape, layer_work
from offplan.held.stage import Stage
from offplan.machine.profile import LayerEstimate, LayerTime, MachineProfile
from offplan.placement import Phase
from offplan.plan import Correction

ESTIMATES = 4
"""Version of the formulas and constants that ``estimate_layer`` estimates by.

Estimates of another version are no longer compared with times. A test asks for the next version
where an estimate moves.
"""
LEAST_RATIO, MOST_RATIO = 0.5, 2.0
"""Bounds of a correction. Source: chosen; no estimate on an H200 or an H100 was as far off."""
CORRECTED_ERRORS = Errors(0.9, 1.15)
"""Errors of corrected compute, at least: those of measured layers elsewhere are added.

Source: chosen, as no GPU was measured with several models of a form; ``WAITING_ERRORS`` are these.
"""


def note_estimates(
    machine: MachineProfile, stages: Iterable[Stage], times: Sequence[LayerTime]
) -> tuple[LayerTime, ...]:
    """Write beside the times of layers what they are estimated to take on the machine.

    A recoded layer, or one with a coded cache, is estimated from the layer as it is stored, and so
    corrects none.
    """
    works = {}
    for stage in stages:
        for layer in stage.layers:
            if (key := stage.time_key(layer.key)) not in works:
                works[key] = layer_work(stage, layer)

    def note(time: LayerTime) -> LayerTime:
        work = works.get(time.layer)
        if work is None or work.stored is not None:
            return time
        phase = Phase(time.phase)
        shape = PassShape(phase, time.batch, time.tokens, time.context, time.is_part)
        seconds = estimate_layer(machine, work, shape)
        if not seconds:
            return time
        said = LayerEstimate(model=ESTIMATES, seconds=seconds, **work.likeness._asdict())
        return time.model_copy(update={"estimate": said})

    return tuple(map(note, times))


def find_correction(machine: MachineProfile, likeness: Likeness, phase: Phase) -> Correction | None:
    """Find how far estimates of such layers are off on the machine; None if it timed none."""
    ratios = machine.estimated_times.get((ESTIMATES, phase.value, *likeness))
    return None if ratios is None else _summarise(ratios, phase)


@cache
def _summarise(ratios: tuple[float, ...], phase: Phase) -> Correction:
    """Sum up ratios of measured times to estimates, in ascending order.

    A corrected range is no narrower than CORRECTED_ERRORS and the ratios themselves, and no wider
    than that of an estimate. A ratio out of bounds narrows nothing.
    """
    middle = statistics.median(ratios)
    ratio = min(max(middle, LEAST_RATIO), MOST_RATIO)
    widest = COMPUTE_ERRORS[phase]
    least = max(widest.least, min(CORRECTED_ERRORS.least, ratios[0] / ratio))
    most = min(widest.most, max(CORRECTED_ERRORS.most, ratios[-1] / ratio))
    if ratio != middle:
        least, most = widest
    return Correction(ratio=ratio, times=len(ratios), least=least, most=most)


def join_corrections(
    layers: Iterable[tuple[Correction | None, float]],
) -> Correction | None:
    """Join the corrections of layers, each with its time; None if a layer has none.

    The ratio is that of all times to all estimates, and the range the widest.
    """
    found: list[tuple[Correction, float]] = []
    for correction, time in layers:
        if correction is None:
            return None
        found.append((correction, time))
    each = list(dict.fromkeys(correction for correction, _ in found))
    if len(each) < 2:
        return next(iter(each), None)
    estimated = sum(time / correction.ratio for correction, time in found)
    return Correction(
        ratio=sum(time for _, time in found) / estimated,
        times=sum(correction.times for correction in each),
        least=min(correction.least for correction in each),
        most=max(correction.most for correction in each),
    )
