"""The machine: each figure with how it was obtained."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from offplan import units
from offplan.machine.curve import Rereads
from offplan.machine.profile import Figure, MachineProfile
from offplan.report.table import make_table
from offplan.stores import STORES

_LINKS = [each.link for each in STORES.values() if each.link is not None]


def machine_payload(machine: MachineProfile) -> dict[str, Any]:
    """Return the profile's own keys, and its fingerprint."""
    return {**machine.model_dump(mode="json"), "fingerprint": machine.fingerprint}


def shared_profile(machine: MachineProfile) -> MachineProfile:
    """Return what others can use of a profile: no layers of a model, nor one host's memory."""
    left = dict.fromkeys(("host_memory", "numa_node", "numa_nodes", "in_place_reads"))
    return machine.model_copy(update={**left, "layer_times": ()})


def render_machine(machine: MachineProfile) -> Table:
    """Show the figures that plans are made from."""
    table = make_table(f"{machine.name}, {machine.link}", "figure", "value", "basis")
    for name, figure, show in _figures(machine):
        if figure is not None:
            spread = "" if figure.spread is None else f", spread {figure.spread:.1%}"
            table.add_row(name, show(figure.value), figure.basis + spread)
    if machine.layer_times:
        table.add_row("compute of layers", f"{len(machine.layer_times)} times", "measured")
    return table


def render_sources(machine: MachineProfile) -> Table:
    """Show the figures that plans are made from, each with where it comes from."""
    table = make_table(f"{machine.name}, {machine.link}", "figure", "value", "basis")
    table.add_column("source", overflow="fold")
    for name, figure, show in _figures(machine):
        if figure is not None:
            table.add_row(name, show(figure.value), figure.basis, figure.source)
    return table


def render_machines(machines: Mapping[str, MachineProfile]) -> Table:
    """List profiles by their names."""
    table = make_table("Machines", "--machine", "GPU memory", "its rate")
    table.add_column("link")
    table.columns[0].no_wrap = True
    for name, machine in machines.items():
        memory, hbm, h2d = machine.gpu_memory.value, machine.hbm.value, machine.h2d.value
        link = f"{machine.link}, {units.format_rate(h2d)}"
        table.add_row(name, units.format_budget(memory), units.format_rate(hbm), link)
    return table


def _figures(machine: MachineProfile) -> list[tuple[str, Figure[Any] | None, Callable[[Any], str]]]:
    """Name the figures, those that not every profile has behind those that all have."""
    return [
        ("host to device, DMA", machine.h2d, units.format_rate),
        ("latency of a copy", machine.copy_latency, units.format_seconds),
        ("host memory read in place", machine.uva, units.format_rate),
        ("GPU memory rate", machine.hbm, units.format_rate),
        ("matrix products", machine.matmul, units.format_flops),
        ("instructions of the CUDA cores", machine.vector, units.format_flops),
        ("launches of a layer", machine.layer_overhead, units.format_seconds),
        ("GPU memory", machine.gpu_memory, units.format_bytes),
        ("context, libraries, graphs", machine.gpu_overhead, units.format_bytes),
        ("the same of several GPUs, beside", machine.ranks_overhead, units.format_bytes),
        ("read in place beside copies", machine.uva_beside_copies, units.format_rate),
        ("re-reads in place", machine.uva_rereads, _show_last_reread),
        ("host to device, GPUs at once", machine.h2d_concurrent, lambda _: _show_slowest(machine)),
        *((link.title, getattr(machine, link.rate), units.format_rate) for link in _LINKS),
        ("host memory", machine.host_memory, units.format_bytes),
        ("pinning host memory", machine.pinning, units.format_rate),
        ("weights, by the host's cores", machine.cores, units.format_rate),
        ("the same beside copies", machine.cores_beside_copies, units.format_rate),
        ("host memory in all", machine.host_reads, units.format_rate),
        ("round trip to the cores", machine.cores_round_trip, units.format_seconds),
        ("threads of the host's cores", machine.host_threads, str),
        ("NUMA node", machine.numa_node, str),
        ("NUMA nodes of the host", machine.numa_nodes, str),
    ]


def _show_last_reread(points: Rereads) -> str:
    return f"{points[-1].factor:.3g}x at {points[-1].rows} rows"


def _show_slowest(machine: MachineProfile) -> str:
    rates = sorted(machine.concurrent_rates.items())
    told = (f"{units.format_rate(min(each))} the slowest of {number}" for number, each in rates)
    return "; ".join(told)
