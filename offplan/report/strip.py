"""Strips and bars of a plan in text: what lies where, layer by layer, and what fills the GPU."""

import textwrap
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from offplan.held.stage import Stage
from offplan.placement import Phase, place
from offplan.plan import GPUMemoryPrediction, Offload
from offplan.units import format_bytes

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_DIGITS = "0123456789"
_COLOURS = {None: "green", True: "cyan", False: "yellow"}
"""Colours of a layer: wholly resident, streamed in a decode step, or read in place."""
_PARTS = "█▓▒░·"
_ASCII_PARTS = "#=+-."
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class LayerStrip:
    """A column for each layer, as high as its share on the GPU."""

    shares: tuple[float, ...]
    """Part of each layer's bytes that lies on the GPU."""
    streams: tuple[bool | None, ...]
    """For each layer, True if a decode step streams all of the rest; None if nothing is left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the layers in lines of the console's width; digits, tenths, on ASCII terminals."""
        layers, width = list(zip(self.shares, self.streams, strict=True)), options.max_width
        for start in range(0, len(layers), width):
            for share, way in layers[start : start + width]:
                digit, height = _DIGITS[min(9, int(share * 10))], _HEIGHTS[round(share * 8)]
                yield Segment(digit if options.ascii_only else height, Style(color=_COLOURS[way]))
            yield Segment.line()


def make_layer_strip(stage: Stage, offload: Offload) -> LayerStrip:
    """Find where each layer's weights lie; the stage is packed as the plan says."""
    streams: list[bool | None] = [None] * len(stage.layers)
    shares = [1.0] * len(stage.layers)
    placement = place(stage, offload)
    for slab in placement.slabs:
        streams[slab.layer] = all(entry.backend(Phase.DECODE).streams for entry in slab.entries)
        size = stage.layers[slab.layer].nbytes or 1
        off_gpu = sum(entry.unit.nbytes for entry in slab.entries)
        if (cache := placement.weight_caches.get(slab.layer)) is not None:
            off_gpu -= cache.weight_bytes
        shares[slab.layer] -= off_gpu / size
    return LayerStrip(tuple(shares), tuple(streams))


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
        # lines break between names, never in one
        told = "  ".join(name.replace(" ", _NO_BREAK) for name in names)
        lines = textwrap.fill(told, width, break_long_words=False, break_on_hyphens=False)
        yield Segment(lines.replace(_NO_BREAK, " ") + "\n")


def memory_parts(memory: GPUMemoryPrediction) -> tuple[tuple[str, int], ...]:
    """Name what fills the GPU memory of a plan, with its bytes."""
    return (
        ("weights", memory.resident_bytes),
        ("ring", memory.ring_bytes),
        ("KV cache", memory.kv_cache_bytes),
        ("activations", memory.activation_bytes),
        ("overhead", memory.overhead_bytes),
    )


_STYLE = Style(color="cyan")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class ShareBar:
    """A horizontal bar: block characters to an eighth of a column, ``#`` on ASCII terminals."""

    share: float
    """Part of the width that is drawn, from 0 to 1."""
    width: int
    """Columns of a whole bar, at most."""
    beside: int = 0
    """Columns of its line that others need: a bar gives way to figures."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; the colour carries nothing that the length does not."""
        width = min(self.width, options.max_width)
        if options.ascii_only:
            text = "#" * round(self.share * width)
        else:
            whole, part = divmod(round(self.share * width * 8), 8)
            text = "█" * whole + (_EIGHTHS[part] if part else "")
        yield Segment(text, _STYLE)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Ask for the whole width, whatever the share: all bars of a table begin at one column."""
        width = max(1, min(self.width, options.max_width - self.beside))
        return Measurement(width, width)
