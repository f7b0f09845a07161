"""What fills the memory of the GPU, the host and a second GPU."""

from offplan.plan import Plan
from offplan.report.pictures.canvas import Canvas
from offplan.report.strip import memory_parts
from offplan.units import format_budget, format_bytes

_COLOURS = ("gpu", "copy", "cache", "work", "over")
"""Colours of the parts of GPU memory, in the order of ``memory_parts``."""


def draw_memory(plan: Plan) -> Canvas:
    """Draw a bar for each memory that a plan takes, as long as its budget."""
    canvas, budget, prediction = Canvas(), plan.budget, plan.prediction
    memory = prediction.gpu_memory
    terms = tuple(zip(_COLOURS, memory_parts(memory), strict=True))
    told = f"{format_bytes(memory.total_bytes)} of {format_budget(budget.gpu_memory)}"
    canvas.text(f"GPU: {told}")
    most = max(budget.gpu_memory, memory.total_bytes, 1)
    parts, before = [], 0
    for colour, (name, size) in terms:
        hint = f"{name}: {format_bytes(size)}"
        parts.append((colour, before / most, (before + size) / most, hint))
        before += size
    canvas.bar(parts)
    canvas.legend(
        [(colour, f"{n} {format_bytes(size)}") for colour, (n, size) in terms if size], columns=2
    )
    on_peer = plan.offload.store == "peer"
    stores = (
        (
            "Host, page-locked",
            prediction.host_memory_bytes,
            None if on_peer else budget.host_memory,
        ),
        ("Second GPU", prediction.peer_memory_bytes, budget.host_memory if on_peer else None),
    )
    for name, size, limit in stores:
        if size:
            canvas.space()
            of = ", no limit known" if limit is None else f" of {format_budget(limit)}"
            canvas.text(f"{name}: {format_bytes(size)}{of}")
            canvas.bar([("host", 0, size / max(limit or size, size), format_bytes(size))])
    return canvas
