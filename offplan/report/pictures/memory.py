"""The picture of what fills the memory of the GPU and of each store."""

from offplan.plan import Plan
from offplan.report.pictures.canvas import LINE, Canvas
from offplan.report.strip import memory_parts
from offplan.stores import STORES
from offplan.units import format_budget, format_bytes

_LONGEST = 0.9
"""Share of the width that a bar without a limit takes at most."""
_COLOURS = ("gpu", "ring", "cache", "work", "over")
"""Colours of the parts of GPU memory, in the order of ``memory_parts``."""


def draw_memory(plan: Plan) -> Canvas:
    """Draw a bar for each memory that a plan takes, as long as its budget."""
    canvas, budget, prediction = Canvas(), plan.budget, plan.prediction
    memory = prediction.gpu_memory
    total, most = memory.total_bytes, max(budget.gpu_memory, memory.total_bytes, 1)
    canvas.text(f"GPU: {format_bytes(total)} of {format_budget(budget.gpu_memory)}")
    parts, names, before = [], [], 0
    for colour, (name, size) in zip(_COLOURS, memory_parts(memory), strict=True):
        hint = f"{name}: {format_bytes(size)}"
        parts.append((colour, before / most, (before + size) / most, hint))
        names += [(colour, f"{name} {format_bytes(size)}")] * (size > 0)
        before += size
    canvas.bar(parts)
    canvas.legend(names, columns=2)
    for store in STORES.values():
        limit = budget.host_memory if store.name == plan.offload.store else None
        if size := prediction.bytes_in(store):
            canvas.space()
            of = ", no limit known" if limit is None else f" of {format_budget(limit)}"
            canvas.text(f"{store.label}: {format_bytes(size)}{of}")
            if limit is not None:
                canvas.bar([("host", 0, size / max(limit, size, 1), format_bytes(size))])
                continue
            # beside the GPU's bar, at its scale, without an end that it could reach
            share = min(_LONGEST, size / most)
            canvas.box("host", 0, share, canvas.height, LINE, format_bytes(size))
            canvas.height += LINE + 4
    return canvas
