"""The model: its layers, what they are made of, what lies outside them."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.tensors import is_index
from offplan.forms.form import RAW
from offplan.report.strip import ShareBar
from offplan.report.table import make_table
from offplan.units import format_bytes, format_bytes_alike

MIN_SHARE = 0.002
"""Segments with a smaller share of the stored bytes are summed up in one row."""
_MAX_RANGES = 3
_FIGURES_WIDTH = 32
"""Columns of the segments' figures and the gaps between them."""
_NAME_WIDTH = 38
_MAX_BAR_WIDTH = 24


def render_model(model: Model) -> list[RenderableType]:
    """Show the model in tables: layers, segments, and what else planning counts."""
    tables = [_render_layers(model), _render_segments(model)]
    return [_render_heading(model), *tables, Group(*_render_facts(model))]


def group_layers(layers: tuple[Layer, ...]) -> list[list[Layer]]:
    """Group layers of the same kind and sizes, wherever they stand, in the order of the first."""
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, *layer.segments.items()), []).append(layer)
    return list(groups.values())


def name_layers(layers: list[Layer]) -> str:
    """Write the indices of layers as ranges."""
    return name_indices([layer.index for layer in layers])


def name_indices(indices: Sequence[int]) -> str:
    """Write ascending indices as ranges, many by the first two and the last: ``0-2, 4-6``."""
    # What neighbours have in common is the distance between index and position.
    ranges = []
    for _, run in groupby(enumerate(indices), key=lambda item: item[1] - item[0]):
        first, *others = (index for _, index in run)
        ends = [first, *others[-1:]]
        ranges.append("-".join(map(str, ends)))
    if len(ranges) > _MAX_RANGES:
        ranges = [*ranges[:2], f"... {ranges[-1]}"]
    return ", ".join(ranges)


def outside_segments(model: Model) -> Counter[str]:
    """Add up the stored bytes outside the layers by name, the final part left out."""
    sums: Counter[str] = Counter()
    for parameter in model.outside_parameters:
        sums[parameter.segment] += parameter.nbytes
    return sums


def _render_heading(model: Model) -> Text:
    revision = f" at {model.revision[:12]}" if model.revision else ""
    return Text(
        f"{model.source}{revision}\n"
        f"{model.model_type}, {model.dtype}: {model.num_parameters:,} parameters in "
        f"{model.num_tensors:,} tensors, {format_bytes(model.total_bytes)}"
    )


def _render_layers(model: Model) -> Table:
    groups = group_layers(model.layers)
    outside = sum(tensor.nbytes for tensor in model.outside)
    sizes = [members[0].nbytes for members in groups]
    totals = [sum(layer.nbytes for layer in members) for members in groups]
    unit, figures = format_bytes_alike([*sizes, *totals, outside])
    table = make_table("Layers", "layers", "kind", "count", f"each, {unit}", f"all, {unit}")
    for at, members in enumerate(groups):
        each, total = figures[at], figures[at + len(groups)]
        table.add_row(name_layers(members), members[0].kind, str(len(members)), each, total)
    table.add_row("outside", "", f"{len(model.outside)} tensors", "", figures[-1])
    return table


def _render_segments(model: Model) -> Table:
    """Show where the bytes are: a row and a bar for each segment, the largest first."""
    sums, counts = _sum_segments(model)
    limit = MIN_SHARE * model.total_bytes
    names = sorted(sums, key=lambda name: (-sums[name], name))
    rows = [(_shorten(n), str(counts[n] or ""), sums[n]) for n in names if sums[n] >= limit]
    if rest := names[len(rows) :]:
        rows.append((f"{len(rest)} smaller ones", "", sum(sums[name] for name in rest)))
    sizes = [size for _, _, size in rows]
    most = max(sizes, default=0)
    longest = max((len(name) for name, _, _ in rows), default=0)
    unit, figures = format_bytes_alike(sizes)
    table = make_table("Segments", "segment", "layers", f"all, {unit}", "share")
    table.add_column(no_wrap=True)
    for (name, count, size), figure in zip(rows, figures, strict=True):
        share = size / model.total_bytes if model.total_bytes else 0.0
        bar = ShareBar(size / most if most else 0.0, _MAX_BAR_WIDTH, _FIGURES_WIDTH + longest)
        table.add_row(name, count, figure, f"{share:.1%}", bar)
    return table


def _sum_segments(model: Model) -> tuple[Counter[str], Counter[str]]:
    """Add up each segment's bytes over all layers, and count its layers."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for layer in model.layers:
        sums.update(layer.segments)
        counts.update(list(layer.segments))
    for name, size in outside_segments(model).items():
        # The blocks of a vision tower, or the experts of a prediction layer, are one row.
        parts = ("*" if is_index(part) else part for part in name.split("."))
        sums[f"outside: {'.'.join(parts)}"] += size
    return sums, counts


def _shorten(name: str) -> str:
    """Cut a name to its column, leading parts first: the end tells more than the start."""
    if len(name) <= _NAME_WIDTH:
        return name
    kind = "outside: " if name.startswith("outside: ") else ""
    room = _NAME_WIDTH - len(kind) - len("...")
    rest = name[-room:]
    return f"{kind}...{rest.partition('.')[2] or rest}"


def _render_facts(model: Model) -> list[Text]:
    facts = []
    if (experts := model.experts) is not None:
        facts.append(
            f"Experts: {experts.num_experts} a layer, {experts.num_experts_per_token} a token, "
            f"{format_bytes(experts.bytes_per_expert)} each"
        )
    facts.append(f"KV cache: {_describe_kv_cache(model)}")
    if forms := _describe_forms(model):
        facts.append(f"Stored as: {forms}")
    if model.tied:
        facts.append(f"Tied, and stored: {', '.join(sorted(model.tied))}")
    if model.not_loaded:
        facts.append(f"Not loaded: {len(model.not_loaded)} tensors outside the causal model")
    facts += [f"Note: {note}" for note in model.notes]
    return [Text(fact) for fact in facts]


def _describe_forms(model: Model) -> str:
    """Say how many bytes are stored in which form; nothing if all are their values."""
    sums: Counter[str] = Counter()
    in_layers = (parameter for layer in model.layers for parameter in layer.parameters)
    for parameter in (*in_layers, *model.outside_parameters):
        sums[parameter.form.label] += parameter.nbytes
    if sums.keys() == {RAW.label}:
        return ""
    return ", ".join(f"{label} {format_bytes(size)}" for label, size in sums.most_common())


def _describe_kv_cache(model: Model) -> str:
    """Say what a token adds, and where that ends."""
    text = f"{format_bytes(sum(c.kv_cache.bytes_per_token for c in model.layers))} a token"
    windows = {c.kv_cache.window for c in model.layers if c.kv_cache.window is not None}
    if windows:
        text += f", in windows of {', '.join(str(w) for w in sorted(windows))} tokens"
    if state := sum(c.kv_cache.state_bytes for c in model.layers):
        text += f", and {format_bytes(state)} a sequence"
    return text
