"""The machine: each figure with how it was obtained."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from offplan import units
from offplan.machine.profile import MachineProfile
from offplan.machine.record import Figure
from offplan.report.table import make_table


def render_machine(machine: MachineProfile) -> Table:
    """Show the figures that plans are made from."""
    table = make_table(f"{machine.name}, {machine.link}", "figure", "value", "basis")
    for name, figure, show in _figures(machine):
        table.add_row(name, show(figure.value), figure.basis)
    if machine.layer_times:
        table.add_row("compute of layers", f"{len(machine.layer_times)} times", "measured")
    return table


def _figures(machine: MachineProfile) -> list[tuple[str, Figure[Any], Callable[[Any], str]]]:
    figures: list[tuple[str, Figure[Any], Callable[[Any], str]]] = [
        ("host to device, DMA", machine.h2d, units.format_rate),
        ("latency of a copy", machine.copy_latency, units.format_seconds),
        ("host memory read in place", machine.uva, units.format_rate),
        ("GPU memory rate", machine.hbm, units.format_rate),
        ("matrix products", machine.matmul, units.format_flops),
        ("overhead of a layer", machine.layer_overhead, units.format_seconds),
        ("GPU memory", machine.gpu_memory, units.format_bytes),
        ("context, libraries, graphs", machine.gpu_overhead, units.format_bytes),
    ]
    if machine.host_memory is not None:
        figures.append(("host memory", machine.host_memory, units.format_bytes))
    return figures
