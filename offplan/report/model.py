"""The model: its layers, what they are made of, what lies outside them."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.checkpoint.model import Layer, Model
from offplan.report.table import make_table
from offplan.units import format_bytes

MIN_SHARE = 0.002
"""Segments with a smaller share of the stored bytes are summed up in one row."""


def render_model(model: Model) -> RenderableType:
    """Show the model in tables: layers, segments, and what else planning counts."""
    return Group(
        _render_heading(model),
        Text(),
        _render_layers(model),
        Text(),
        _render_segments(model),
        Text(),
        *_render_facts(model),
    )


def layer_ranges(layers: tuple[Layer, ...]) -> Iterator[tuple[str, list[Layer]]]:
    """Group neighbouring layers of the same kind and size: ``("1-26", [...])``."""
    for _, group in groupby(layers, key=lambda layer: (layer.kind, layer.segments)):
        members = list(group)
        first, last = members[0].index, members[-1].index
        yield (str(first) if first == last else f"{first}-{last}"), members


def outside_segments(model: Model) -> dict[str, int]:
    """Stored bytes outside the layers by name, the final part left out."""
    sums: dict[str, int] = {}
    for tensor in sorted(model.outside):
        segment = tensor.name.rpartition(".")[0] or tensor.name
        sums[segment] = sums.get(segment, 0) + tensor.nbytes
    return sums


def _render_heading(model: Model) -> Text:
    revision = f" at {model.revision[:12]}" if model.revision else ""
    return Text(
        f"{model.source}{revision}\n"
        f"{model.model_type}, {model.dtype}: {model.num_parameters:,} parameters in "
        f"{model.num_tensors:,} tensors, {format_bytes(model.total_bytes)}"
    )


def _render_layers(model: Model) -> Table:
    table = make_table("Layers", "layers", "kind", "count", "each", "all")
    for name, members in layer_ranges(model.layers):
        size = members[0].nbytes
        each, total = format_bytes(size), format_bytes(size * len(members))
        table.add_row(name, members[0].kind, str(len(members)), each, total)
    outside = sum(tensor.nbytes for tensor in model.outside)
    table.add_row("outside", "", f"{len(model.outside)} tensors", "", format_bytes(outside))
    return table


def _render_segments(model: Model) -> Table:
    table = make_table("Segments", "segment", "layers", "all", "share")
    sums: dict[str, int] = {}
    counts: dict[str, int] = {}
    for layer in model.layers:
        for name, size in layer.segments.items():
            sums[name] = sums.get(name, 0) + size
            counts[name] = counts.get(name, 0) + 1
    for name, size in outside_segments(model).items():
        sums[f"outside: {name}"] = size
    limit = MIN_SHARE * model.total_bytes
    shown = sorted((name for name in sums if sums[name] >= limit), key=lambda n: (-sums[n], n))
    for name in shown:
        count = str(counts[name]) if name in counts else ""
        table.add_row(
            name, count, format_bytes(sums[name]), f"{sums[name] / model.total_bytes:.1%}"
        )
    if rest := [size for name, size in sums.items() if name not in shown]:
        share = sum(rest) / model.total_bytes
        table.add_row(f"{len(rest)} smaller ones", "", format_bytes(sum(rest)), f"{share:.1%}")
    return table


def _render_facts(model: Model) -> list[Text]:
    facts = []
    if (experts := model.experts) is not None:
        facts.append(
            f"Experts: {experts.num_experts} a layer, {experts.num_experts_per_token} a token, "
            f"{format_bytes(experts.bytes_per_expert)} each"
        )
    facts.append(f"KV cache: {_describe_kv_cache(model)}")
    if model.tied:
        facts.append(f"Tied, counted once: {', '.join(sorted(model.tied))}")
    if model.not_loaded:
        facts.append(f"Not loaded: {len(model.not_loaded)} tensors outside the causal model")
    facts += [f"Note: {note}" for note in model.notes]
    return [Text(fact) for fact in facts]


def _describe_kv_cache(model: Model) -> str:
    """Say what a token adds, and where that ends."""
    text = f"{format_bytes(sum(c.kv_cache.bytes_per_token for c in model.layers))} a token"
    windows = {c.kv_cache.window for c in model.layers if c.kv_cache.window is not None}
    if windows:
        text += f", in windows of {', '.join(str(w) for w in sorted(windows))} tokens"
    if state := sum(c.kv_cache.state_bytes for c in model.layers):
        text += f", and {format_bytes(state)} a sequence"
    return text
