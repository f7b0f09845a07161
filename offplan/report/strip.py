"""Strips and bars of a plan in text: what lies where, layer by layer, and what fills the GPU."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from offplan.held.stage import Stage
from offplan.placement import Phase, place
from offplan.plan import GPUMemoryPrediction, Offload
from offplan.units import format_bytes

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_DIGITS = "0123456789"
_RESIDENT, _STREAMED, _IN_PLACE = (
    Style(color="green"),
    Style(color="cyan"),
    Style(color="yellow"),
)
_PARTS = "█▓▒░·"
_ASCII_PARTS = "#=+-."


@dataclass(frozen=True)
class LayerStrip:
    """A column for each layer, as high as its share on the GPU."""

    shares: tuple[float, ...]
    """Part of each layer's bytes that lies on the GPU."""
    streams: tuple[bool | None, ...]
    """Whether a decode step streams all of the rest; None where there is none."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the layers in lines of the console's width; digits, tenths, on ASCII terminals."""
        styles = {None: _RESIDENT, True: _STREAMED, False: _IN_PLACE}
        layers, width = list(zip(self.shares, self.streams, strict=True)), options.max_width
        for start in range(0, len(layers), width):
            for share, way in layers[start : start + width]:
                if options.ascii_only:
                    yield Segment(_DIGITS[min(9, int(share * 10))], styles[way])
                else:
                    yield Segment(_HEIGHTS[round(share * 8)], styles[way])
            yield Segment.line()


def make_layer_strip(stage: Stage, offload: Offload) -> LayerStrip:
    """Find where each layer's weights lie; the stage is packed as the plan says."""
    placement = place(stage, offload)
    on_host = {slab.layer: sum(e.unit.nbytes for e in slab.entries) for slab in placement.slabs}
    streams = {
        slab.layer: all(entry.backend(Phase.DECODE).streams for entry in slab.entries)
        for slab in placement.slabs
    }
    shares = [
        1 - on_host.get(index, 0) / layer.nbytes if layer.nbytes else 1.0
        for index, layer in enumerate(stage.layers)
    ]
    return LayerStrip(tuple(shares), tuple(streams.get(index) for index in range(len(shares))))


@dataclass(frozen=True)
class MemoryBar:
    """One bar of a budget, its parts one after another, and a line that names them."""

    parts: tuple[tuple[str, int], ...]
    """Names and bytes, in order."""
    total: int
    """Bytes of the whole bar."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar over the console's width, then what each of its signs stands for."""
        width = options.max_width
        signs = _ASCII_PARTS if options.ascii_only else _PARTS
        bar, names, before = "", [], 0
        for sign, (name, size) in zip(signs, self.parts, strict=False):
            end = round((before + size) / self.total * width) if self.total else 0
            bar += sign * (end - len(bar))
            names += [f"{sign} {name} {format_bytes(size)}"] * (size > 0)
            before += size
        yield Segment(bar.ljust(width, "_") + "\n")
        line = ""
        for name in names:
            if line and len(line) + 2 + len(name) > width:
                yield Segment(f"{line}\n")
                line = ""
            line += f"{'  ' if line else ''}{name}"
        yield Segment(f"{line}\n")


def make_memory_bar(memory: GPUMemoryPrediction, budget: int) -> MemoryBar:
    """Bring what fills the GPU memory of a plan into a bar of its budget."""
    return MemoryBar(memory_parts(memory), budget)


def memory_parts(memory: GPUMemoryPrediction) -> tuple[tuple[str, int], ...]:
    """Name what fills the GPU memory of a plan, with its bytes."""
    return (
        ("weights", memory.resident_bytes),
        ("ring", memory.ring_bytes),
        ("KV cache", memory.kv_cache_bytes),
        ("activations", memory.activation_bytes),
        ("overhead", memory.overhead_bytes),
    )
