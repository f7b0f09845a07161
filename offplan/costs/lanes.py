"""Work of compute and the link at each moment of a prompt and of a decode step, as priced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from offplan.costs.calls import list_calls
from offplan.costs.compute import ModelCompute
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import (
    BEFORE_ALL,
    Doing,
    PassTimes,
    Queue,
    Time,
    largest_cycle_mean,
    map_moments,
    run_prompt,
    run_step,
    to_seconds,
)
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import place
from offplan.plan import Plan
from offplan.schedule import Schedule, build_steady_request


@dataclass(frozen=True)
class Event:
    """One thing that a queue does."""

    queue: Queue
    doing: Doing
    layer: int | None
    """None outside of all layers."""
    start_s: float
    """Seconds from the beginning of the phase."""
    stop_s: float


@dataclass(frozen=True)
class PhaseLanes:
    """The events of one phase."""

    step_s: float
    """Seconds of the phase: the prompt, or a decode step in steady state."""
    events: tuple[Event, ...]
    """Events in the order of their beginning, each cut to the phase. A step's copies may be under
    way when it begins, and go on when it ends."""


@dataclass(frozen=True)
class RequestLanes:
    """The events of both phases of a request."""

    prefill: PhaseLanes
    decode: PhaseLanes


def trace_plan(plan: Plan, stage: Stage, machine: MachineProfile) -> RequestLanes:
    """Follow a plan's schedules through the queues of a machine.

    ``stage`` is as the plan's runner holds it, ``machine`` has the link to the plan's store.
    """
    placement = place(stage, plan.offload)
    compute = ModelCompute(stage, machine)
    prompt = compute.price(*prefill_shapes(plan.workload, plan.offload.prefill_chunk))
    calls = list_calls(stage, len(prompt.shapes))
    request = build_steady_request(placement, len(stage.layers), calls, len(prompt.shapes))
    step = compute.price(decode_shape(plan.workload))
    return RequestLanes(
        trace_prompt(request.prefill, pass_times(placement, stage, machine, prompt)),
        trace_step(request.decode, pass_times(placement, stage, machine, step)),
    )


def trace_prompt(schedule: Schedule, times: PassTimes) -> PhaseLanes:
    """Follow a prompt, which begins with an idle link."""
    recorder = _Recorder()
    step_ps = run_prompt(schedule, times, recorder.record)[0]
    return recorder.phase(0, step_ps)


def trace_step(schedule: Schedule, times: PassTimes) -> PhaseLanes:
    """Follow a decode step in steady state, which takes exactly what ``price_decode`` says.

    Two such steps are run, and the second is shown: with what the first leaves on the link.
    """
    columns = map_moments(schedule, times)
    step_ps = largest_cycle_mean(columns)
    state = steady_moments(columns, step_ps)
    start_ps = state[0] + step_ps
    recorder = _Recorder()
    for _ in range(2):
        run_step(schedule, times, state, recorder.record)
    return recorder.phase(start_ps, step_ps)


def steady_moments(columns: Sequence[Sequence[Time]], mean: Fraction) -> list[Time]:
    """Return moments that a step puts off by exactly its cycle mean, all of them alike.

    They are an eigenvector of the max-plus map: with the mean taken off every edge, the heaviest
    walks from a moment on a heaviest cycle. Source: F. Baccelli et al., Synchronization and
    Linearity (1992), chapter 3.
    """
    size = range(len(columns))
    # weights stay exact: only a missing edge is a float
    walks: list[list[Time]] = [
        [w if w == BEFORE_ALL else int(w) - mean for w in column] for column in columns
    ]
    for middle in size:
        for i in size:
            for j in size:
                walks[i][j] = max(walks[i][j], walks[i][middle] + walks[middle][j])
    return next(walks[i] for i in size if walks[i][i] == 0)


@dataclass
class _Span:
    """A thing that a queue does, in picoseconds; later ones may put it off."""

    queue: Queue
    doing: Doing
    layer: int | None
    start: Time
    stop: Time


class _Recorder:
    """Keeps what the queues do; copies make way for what kernels read in place meanwhile."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def record(
        self, queue: Queue, doing: Doing, layer: int | None, start: Time, stop: Time
    ) -> None:
        """Take one thing that a queue does, in the order in which operations are issued."""
        if doing == "read" and queue == "link":
            taken = stop - start
            for span in [each for each in self._spans if each.doing == "copy"]:
                if span.start >= start:
                    span.start += taken
                    span.stop += taken
                elif span.stop > start:
                    self._spans.append(replace(span, start=stop, stop=span.stop + taken))
                    span.stop = start
        self._spans.append(_Span(queue, doing, layer, start, stop))

    def phase(self, start: Time, took: Time) -> PhaseLanes:
        """Return what there was in a window of time, cut to it."""

        def cut(moment: Time) -> float:
            return to_seconds(Fraction(min(max(moment - start, 0), took)))

        events = (
            Event(each.queue, each.doing, each.layer, cut(each.start), cut(each.stop))
            for each in sorted(self._spans, key=lambda each: each.start)
        )
        lasting = tuple(event for event in events if event.stop_s > event.start_s)
        return PhaseLanes(to_seconds(Fraction(took)), lasting)
