"""The pictures of what lies where, layer by layer, and of what fills the GPU."""

from collections import Counter
from collections.abc import Mapping

from offplan.held.stage import Stage
from offplan.placement import Placement, SlabEntry, place
from offplan.plan import Offload, Plan
from offplan.report.pictures.canvas import LINE, Canvas
from offplan.report.strip import memory_parts
from offplan.stores import STORES
from offplan.units import format_budget, format_bytes

_HEIGHT = 72
_LAYERS = 0.95
"""Share of the width that the layers take."""
_GAP = 0.12
"""Part of a column's width between it and the next one."""

_WAYS = {(True, True): "copy", (True, False): "both", (False, True): "turn", (False, False): "read"}
"""Colours by whether prompts stream, and whether tokens do."""
_BY_RATE = {"cores_rate": "multiply"}
"""Colours of what tokens need by another rate than the link's."""
_NAMES = {
    "gpu": "on the GPU",
    "work": "experts used last, on the GPU as well",
    "copy": "copied before their layer",
    "both": "prompts copy, tokens read it",
    "turn": "prompts read, tokens copy it",
    "read": "read in place",
    "multiply": "multiplied by the host's cores for tokens",
    "row": "embeddings, read by row",
}
"""The meaning of each colour, in the order in which a column is piled up."""


def draw_layers(stage: Stage, offload: Offload) -> Canvas:
    """Pile up each layer's bytes by where they lie, as shares of the layer.

    The stage is packed as the plan says.
    """
    canvas = Canvas()
    piles = pile_layers(stage, place(stage, offload))
    sums: Counter[str] = Counter()
    width = _LAYERS / max(1, len(piles) - 1)
    for number, pile in enumerate(piles):
        sums.update(pile)
        is_layer = number < len(piles) - 1
        name = f"layer {number}" if is_layer else "outside the layers"
        start, stop = (number * width, (number + 1 - _GAP) * width) if is_layer else (0.965, 1)
        _draw_pile(canvas, pile, name, start, stop)
    canvas.height = _HEIGHT
    canvas.label("layer 0", 0)
    canvas.label(f"{len(piles) - 2}", _LAYERS - width / 2)
    canvas.height += 22
    entries = [(each, f"{_NAMES[each]}: {format_bytes(sums[each])}") for each in _NAMES]
    canvas.legend([entry for entry in entries if sums[entry[0]]])
    return canvas


def pile_layers(stage: Stage, placement: Placement) -> list[Mapping[str, int]]:
    """Return bytes by colour, of each layer and, last, of what lies outside of them."""
    slabs = {slab.layer: slab for slab in placement.slabs}
    piles: list[Mapping[str, int]] = []
    for layer in stage.layers:
        pile: Counter[str] = Counter()
        for entry in slabs[layer.index].entries if layer.index in slabs else ():
            pile[_find_way(entry)] += entry.unit.nbytes
        resident = layer.nbytes - pile.total()
        if (cache := placement.weight_caches.get(layer.index)) is not None:
            cached = (entry for entry in slabs[layer.index].entries if entry.is_cached)
            way = _find_way(next(cached))
            pile["work"] = cache.weight_bytes
            pile[way] -= pile["work"]
        piles.append({"gpu": resident, **pile})
    of_rows = placement.table_bytes
    return [*piles, {"gpu": stage.outside_bytes - of_rows, "row": of_rows}]


def _find_way(entry: SlabEntry) -> str:
    """Return the colour of weights that are off the GPU."""
    usual = _WAYS[entry.prefill.streams, entry.decode.streams]
    return _BY_RATE.get(entry.decode.rate_name, usual)


def _draw_pile(
    canvas: Canvas, pile: Mapping[str, int], name: str, start: float, stop: float
) -> None:
    total, below = sum(pile.values()), 0
    for colour in _NAMES:
        if size := pile.get(colour, 0):
            height = _HEIGHT * size / total
            top = _HEIGHT - _HEIGHT * below / total - height
            hint = f"{name}: {format_bytes(size)} {_NAMES[colour]}"
            canvas.box(colour, start, stop, top, height, hint)
            below += size


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
