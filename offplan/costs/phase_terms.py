"""What a phase takes, term by term."""

from collections.abc import Iterator
from fractions import Fraction

from offplan.costs.compute import MATMUL_EFFICIENCY, PassCompute
from offplan.costs.link import uva_slowdown
from offplan.costs.term import Input, Term, list_figures, list_sizes
from offplan.costs.timeline import PhaseTimes, to_seconds
from offplan.held.packing import is_packed
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile


def list_phase(
    stage: Stage, machine: MachineProfile, priced: PassCompute, taken: PhaseTimes
) -> Iterator[Term]:
    """List the terms of a phase: its step is what it computes and what it waits."""

    def seconds(name: str, time_ps: Fraction | int, formula: str, *inputs: Input) -> Term:
        path = f"{priced.shapes[0].phase.value}.{name}"
        return Term(path, to_seconds(time_ps), "s", formula, inputs)

    source = "measured on the machine, at these shapes"
    roofline: tuple[Input, ...] = ()
    if not priced.measured:
        source = f"roofline, of which matmul counts {MATMUL_EFFICIENCY:g}, or scaled from it"
        if any(is_packed(p) for layer in stage.layers for p in layer.parameters):
            source += "; what packing adds is as on an H200"
        roofline = list_figures(machine, "hbm", "matmul", "layer_overhead")
    computed = {"layers": sum(priced.layer_ps), "outside the layers": priced.outside_ps}
    yield seconds(
        "compute",
        taken.compute_ps,
        " + ".join(computed),
        *(Input(name, to_seconds(ps), "s", source) for name, ps in computed.items()),
        *roofline,
    )
    crossing = list_sizes({"streamed": taken.copied_bytes, "read in place": taken.read_bytes})
    yield Term(
        f"{priced.shapes[0].phase.value}.link_bytes",
        taken.link_bytes,
        "bytes",
        "streamed + read in place, re-reads included",
        crossing,
    )
    yield seconds(
        "link",
        taken.link_ps,
        "copies x copy_latency + streamed / h2d + read in place / uva",
        Input("copies", taken.num_copies, "count"),
        *list_figures(machine, "copy_latency", "h2d", "uva"),
    )
    awaited = Input("link waited for", to_seconds(taken.awaited_ps), "s")
    yield seconds("bound", taken.bound_ps, "max(compute, link waited for)", awaited)
    slowdown = Input("slowdown of reading beside copies", uva_slowdown(machine), "count")
    reading = (slowdown,) if taken.read_bytes else ()
    yield seconds("stall", taken.step_ps - taken.compute_ps, taken.waiting, *reading)
    yield seconds("step", taken.step_ps, "compute + stall")
