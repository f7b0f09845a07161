"""A trace of a plan for Perfetto and chrome://tracing: predicted, and measured beside it.

Source: the Trace Event Format, https://ui.perfetto.dev opens it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from offplan.costs.lanes import PhaseLanes, RequestLanes
from offplan.report.bench_file import BenchFile, RecordedWaits

NUM_STEPS = 4
"""Predicted decode steps shown; as many as were measured where any were."""
_LANES = {"compute": 1, "link": 2, "cores": 3}
_PREDICTED, _MEASURED = 1, 2


def write_trace(lanes: RequestLanes, bench: BenchFile | None) -> str:
    """Write a prompt and some decode steps as JSON.

    The decode steps of both sides begin at one moment. The measured side has no lane of the link:
    only its waits are recorded, and compute lies between them.
    """
    used = {event.queue for phase in (lanes.prefill, lanes.decode) for event in phase.events}
    there = [name for name in _LANES if name in {"compute", "link", *used}]
    events = list(_name_lanes(_PREDICTED, "predicted", there))
    measured = None if bench is None else bench.measured
    prompt = None if measured is None else measured.prefill.recorded
    steps = None if measured is None else measured.decode.recorded
    events += _trace_lanes(lanes.prefill, 0.0)
    decode_s = max(lanes.prefill.step_s, prompt.seconds if prompt is not None else 0.0)
    for number in range(NUM_STEPS if steps is None else steps.num_passes):
        events += _trace_lanes(lanes.decode, decode_s + number * lanes.decode.step_s)
    if prompt is not None and steps is not None:
        events += _name_lanes(_MEASURED, "measured", ("compute",))
        events += _trace_recording(prompt, 0.0)
        events += _trace_recording(steps, decode_s)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _name_lanes(process: int, name: str, lanes: Sequence[str]) -> Iterator[dict[str, Any]]:
    meta = {"ph": "M", "pid": process}
    yield {**meta, "name": "process_name", "args": {"name": name}}
    for lane in lanes:
        yield {**meta, "tid": _LANES[lane], "name": "thread_name", "args": {"name": lane}}


def _trace_lanes(lanes: PhaseLanes, start_s: float) -> Iterator[dict[str, Any]]:
    for each in lanes.events:
        span = start_s + each.start_s, start_s + each.stop_s
        yield _event(_PREDICTED, each.queue, each.doing, each.layer, *span)


def _trace_recording(recorded: RecordedWaits, start_s: float) -> Iterator[dict[str, Any]]:
    before_s = 0.0
    for wait in recorded.waits:
        span = start_s + wait.start_s, start_s + wait.stop_s
        yield _event(_MEASURED, "compute", "compute", None, start_s + before_s, span[0])
        yield _event(_MEASURED, "compute", "wait", wait.layer, *span)
        before_s = wait.stop_s
    end_s = start_s + recorded.seconds
    yield _event(_MEASURED, "compute", "compute", None, start_s + before_s, end_s)


def _event(
    process: int, lane: str, doing: str, layer: int | None, start_s: float, stop_s: float
) -> dict[str, Any]:
    name = doing if layer is None else f"{doing} layer {layer}"
    times = {"ts": 1e6 * start_s, "dur": 1e6 * max(0.0, stop_s - start_s)}
    return {"ph": "X", "pid": process, "tid": _LANES[lane], "cat": doing, "name": name, **times}
