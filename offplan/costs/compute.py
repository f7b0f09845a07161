"""Seconds of compute with everything resident: measured where a profile has it, else a roofline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log

from offplan.costs.calls import count_calls
from offplan.costs.capabilities import RECODED_HEAD_BYTES, RECODED_LAYER_BYTES
from offplan.costs.corrections import find_correction, join_corrections
from offplan.costs.kernels import (
    LAUNCH_S,
    MOVED_EFFICIENCY,
    estimate_layer,
    head_seconds,
    layer_seconds,
)
from offplan.costs.kv_cache import cached_bytes
from offplan.costs.pass_compute import PassCompute
from offplan.costs.states import adding_seconds
from offplan.costs.timeline import to_ps
from offplan.costs.work import (
    LayerWork,
    PassShape,
    head_expands,
    layer_work,
    moved_bytes,
)
from offplan.held.stage import Stage
from offplan.machine.profile import LayerTime, MachineProfile
from offplan.plan import Correction

REST_SHARE = 0.1
"""Part of a measured prompt's compute, at most, that is scaled from chunks over twice as large.

Source: chosen.
"""


@dataclass(frozen=True)
class ComputeTime:
    """A time of compute, and whether it was measured."""

    seconds: float
    measured: bool
    """True if it was measured at this shape, or equal chunks of a prompt before and behind it were.
    Otherwise it is estimated."""
    correction: Correction | None = None
    """What measured layers of other models changed about an estimate."""


@dataclass(frozen=True)
class ModelCompute:
    """Prices the passes of one model on one machine; equal layers are summed up once."""

    stage: Stage
    machine: MachineProfile

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """``Layer.key`` of every layer."""
        return tuple(layer.key for layer in self.stage.layers)

    @cached_property
    def works(self) -> dict[str, LayerWork]:
        """The work of each kind of layer, by its key."""
        works: dict[str, LayerWork] = {}
        for layer in self.stage.layers:
            if layer.key not in works:
                works[layer.key] = layer_work(self.stage, layer)
        return works

    def price(self, *shapes: PassShape) -> PassCompute:
        """Price one pass of these chunks."""
        chunks = [self._price_layers(shape) for shape in shapes]
        outside = outside_time(self.machine, self.stage, shapes[-1])
        times = {key: sum(to_ps(chunk[key].seconds) for chunk in chunks) for key in self.works}
        calls = count_calls(self.stage, shapes[0].phase)
        routed = {
            key: sum(
                round(routed_share(self.machine, work, shape) * to_ps(chunk[key].seconds))
                for shape, chunk in zip(shapes, chunks, strict=True)
            )
            for key, work in self.works.items()
        }
        return PassCompute(
            shapes,
            layer_ps=tuple(n * times[key] for n, key in zip(calls, self.keys, strict=True)),
            outside_ps=to_ps(outside.seconds)
            + to_ps(adding_seconds(self.machine, self.stage, shapes[0])),
            measured=self._are_measured(shapes, chunks, outside),
            routed_ps=tuple(routed[key] for key in self.keys),
            correction=join_corrections(
                (chunks[0][key].correction, float(times[key])) for key in self.keys
            ),
        )

    def _price_layers(self, shape: PassShape) -> dict[str, ComputeTime]:
        return {key: layer_time(self.machine, work, shape) for key, work in self.works.items()}

    def _are_measured(
        self,
        shapes: Sequence[PassShape],
        chunks: Sequence[Mapping[str, ComputeTime]],
        outside: ComputeTime,
    ) -> bool:
        """Return True if all chunks were measured, but for a last one that is scaled.

        A machine times that as a whole one. It is scaled from chunks up to twice as large, or
        takes up to REST_SHARE.
        """
        first, last = shapes[0], shapes[-1]
        times, rest = [*chunks], 0.0
        if last.tokens < first.tokens and not outside.measured:
            scaled = times.pop()
            own = {each.key for work in self.works.values() for each in (work, work.stored) if each}
            parts = [t.tokens for t in self.machine.layer_times if t.is_part and t.layer in own]
            if not parts or min(parts) > 2 * last.tokens:
                rest = sum(time.seconds for time in scaled.values())
            begin = last.context - last.tokens
            context = begin + first.tokens
            whole = replace(last, tokens=first.tokens, context=context, is_rest=False)
            outside = outside_time(self.machine, self.stage, whole)
            times.append(self._price_layers(whole))
        taken = sum(time.seconds for chunk in chunks for time in chunk.values())
        is_measured = all(time.measured for chunk in times for time in chunk.values())
        return is_measured and outside.measured and rest <= REST_SHARE * taken


def layer_time(machine: MachineProfile, work: LayerWork, shape: PassShape) -> ComputeTime:
    """Price one layer: the measured time of this shape, or an estimate.

    Measured layers of other models correct the estimate of a layer without times of its own. Times
    of two equal chunks give those between them, and chunks that of a longer prompt. Times measured
    at other shapes of the same layer scale it, or, of the chunks of a prompt, differ from it by as
    much. A smaller chunk takes its share of a larger one at least. A recoded layer that was not
    measured itself takes what that costs beyond the layer as it is stored: never less. A cache that
    is kept as codes adds ``cached_bytes``.
    """
    if work.stored is not None and work.key not in machine.timed_layers:
        stored = layer_time(machine, work.stored, shape)
        seconds = stored.seconds
        if work.is_recoded:
            seconds += RECODED_LAYER_BYTES(work, shape) / machine.hbm.value
        if work.kv_cache.is_coded:
            more = cached_bytes(work, shape, in_place=not machine.is_cpu) / machine.hbm.value
            seconds = max(seconds + more, layer_seconds(machine, work, shape).total)
        return ComputeTime(seconds, measured=False, correction=stored.correction)

    estimate = partial(estimate_layer, machine, work)
    known = _from_times(machine, work.key, shape, estimate)
    if known is not None:
        return known
    seconds = estimate(shape)
    correction = find_correction(machine, work.likeness, shape.phase)
    if correction is not None:  # never to less than its bytes take
        least = min(seconds, work.device_bytes(shape) / machine.hbm.value)
        seconds = max(least, correction.ratio * seconds)
    return ComputeTime(seconds, measured=False, correction=correction)


def routed_share(machine: MachineProfile, work: LayerWork, shape: PassShape) -> float:
    """Part of a layer's kernels that are products with routed experts."""
    taken = layer_seconds(machine, work, shape)
    return taken.routed / taken.total if taken.routed else 0.0


def outside_time(machine: MachineProfile, stage: Stage, shape: PassShape) -> ComputeTime:
    """Price embedding rows, final norm and the head on the tokens that it gives logits of.

    The values of a head that is stored as codes may have to be made, and then read.
    """
    head, element_bytes = stage.head, stage.element_bytes

    def estimate(at: PassShape) -> float:
        if stage.passes is not None:
            launching = LAUNCH_S * stage.passes.operators[at.phase.value][-1]
            moved = moved_bytes(stage, -1, at) / MOVED_EFFICIENCY / machine.hbm.value
            return max(launching, of_head(at) + moved)
        return of_head(at)

    def of_head(at: PassShape) -> float:
        if head is None:
            return 0.0
        # an embedding row in, a hidden state out
        rows = 2 * at.num_tokens * min(head.shape) * element_bytes
        makes = head_expands(head, at, element_bytes)
        made = head.num_weights if makes else 0
        recodes = head.is_recoded and not makes
        stored = RECODED_HEAD_BYTES(head, at) if recodes else head.nbytes
        num_bytes = stored + rows + 2 * element_bytes * made
        return head_seconds(machine, num_bytes, head.num_weights, at.head_rows)

    known = _from_times(machine, stage.time_key(stage.outside_key), shape, estimate)
    return known or ComputeTime(estimate(shape), measured=False)


def _from_times(
    machine: MachineProfile, key: str, shape: PassShape, estimate: Callable[[PassShape], float]
) -> ComputeTime | None:
    """Price by the times that were measured of a layer in this phase; None if none were."""
    wanted = key, shape.phase.value
    others = [time for time in machine.layer_times if (time.layer, time.phase) == wanted]
    for time in others:
        if PassShape(shape.phase, time.batch, time.tokens, time.context, time.is_part) == shape:
            return ComputeTime(time.seconds, measured=True)
    # chunks of a longer prompt launch more, and may not be captured where a whole one is
    others = [time for time in others if time.is_part == shape.is_part] or others
    if not others:
        return None
    alike = {
        time.context: time.seconds
        for time in others
        if (time.batch, time.tokens) == (shape.batch, shape.tokens)
    }
    if alike and min(alike) < shape.context < max(alike):
        return ComputeTime(_interpolate(alike, shape.context), measured=shape.is_part)
    if parts := _split(shape, others):
        times = [_from_times(machine, key, part, estimate) for part in parts]
        return ComputeTime(sum(time.seconds for time in times if time), measured=False)
    nearest = min(others, key=lambda time: (_distance(time, shape), time.tokens, time.context))
    known = PassShape(shape.phase, nearest.batch, nearest.tokens, nearest.context)
    wanted_s, known_s = estimate(shape), estimate(known)
    scaled_s = nearest.seconds * (wanted_s / known_s if known_s else 1.0)
    if not shape.is_part:
        return ComputeTime(scaled_s, measured=False)
    # what launches and joining take does not grow with it
    seconds = nearest.seconds + wanted_s - known_s
    return ComputeTime(max(seconds, scaled_s if wanted_s < known_s else 0.0), measured=False)


def _interpolate(times: Mapping[int, float], context: int) -> float:
    """Return the time on the line between the contexts next to one: attention grows evenly."""
    below = max(each for each in times if each <= context)
    above = min(each for each in times if each > context)
    share = (context - below) / (above - below)
    return (1 - share) * times[below] + share * times[above]


def _split(shape: PassShape, times: Sequence[LayerTime]) -> tuple[PassShape, ...]:
    """Split a chunk that is larger than any that was timed into chunks as they were timed.

    Returns none if it is not larger, or if chunks were not timed at several places of a prompt.
    """
    parts = [each for each in times if each.is_part and each.batch == shape.batch]
    largest = max((each.tokens for each in parts), default=shape.tokens)
    reach = {each.context for each in parts if each.tokens == largest}
    if largest >= shape.tokens or len(reach) < 2:
        return ()
    return tuple(
        PassShape(shape.phase, shape.batch, stop - start, stop, is_part=True)
        for start in range(shape.context - shape.tokens, shape.context, largest)
        for stop in [min(start + largest, shape.context)]
    )


def _distance(time: LayerTime, shape: PassShape) -> float:
    tokens = abs(log(time.batch * time.tokens / shape.num_tokens))
    return tokens + abs(log(time.context / shape.context))
