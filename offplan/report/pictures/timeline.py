"""Work of compute and the link during a phase: one lane each, from left to right."""

from offplan.costs.lanes import PhaseLanes
from offplan.report.pictures.canvas import Canvas
from offplan.units import format_seconds

_QUEUES = {"compute": "compute", "link": "link", "cores": "the host's cores"}
_DOES = {
    "compute": "computes",
    "wait": "waits for the link",
    "late": "waits for the host's cores",
    "read": "reads in place",
    "copy": "copies",
    "multiply": "the host's cores multiply",
}
"""The meaning of each colour; a lane of the cores is there where they work."""


def draw_lanes(lanes: PhaseLanes) -> Canvas:
    """Draw a phase; what reads in place is on both lanes."""
    canvas, step_s = Canvas(), lanes.step_s or 1.0
    sums: dict[str, float] = dict.fromkeys(_DOES, 0.0)
    used = {"compute", "link", *(event.queue for event in lanes.events)}
    for queue, title in _QUEUES.items():
        if queue not in used:
            continue
        canvas.text(title, "faint")
        parts = []
        for event in lanes.events:
            if event.queue != queue:
                continue
            took = event.stop_s - event.start_s
            if event.doing != "read" or queue == "compute":
                sums[event.doing] += took
            where = "outside the layers" if event.layer is None else f"layer {event.layer}"
            hint = f"{where}: {_DOES[event.doing]}: {format_seconds(took)}"
            start, stop = event.start_s / step_s, event.stop_s / step_s
            parts.append((event.doing, start, stop, hint))
        canvas.bar(parts)
    canvas.scale("0", *(format_seconds(lanes.step_s * part) for part in (0.5, 1)))
    names = {each: f"{does} {format_seconds(sums[each])}" for each, does in _DOES.items()}
    canvas.legend([(each, name) for each, name in names.items() if sums[each]])
    return canvas
