"""Costs of a phase, term by term."""

from collections.abc import Iterator
from fractions import Fraction

from offplan.backends import Backend
from offplan.costs.capabilities import MISSES, WAITS
from offplan.costs.pass_compute import PassCompute
from offplan.costs.term import Input, Term, list_figures, list_sizes, show_figure
from offplan.costs.timeline import PhaseTimes, to_seconds
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement


def list_phase(
    stage: Stage,
    machine: MachineProfile,
    priced: PassCompute,
    taken: PhaseTimes,
    placement: Placement,
) -> Iterator[Term]:
    """List the terms of a phase: its step is what it computes and what it waits."""
    phase = priced.shapes[0].phase.value

    def seconds(name: str, time_ps: Fraction | int, formula: str, *inputs: Input) -> Term:
        return Term(f"{phase}.{name}", to_seconds(time_ps), "s", formula, inputs)

    source = "measured on the machine"
    roofline: tuple[Input, ...] = ()
    if not priced.measured:
        source = "kernels, the longer of bytes and arithmetic each, or scaled from them"
        if (correction := priced.correction) is not None:
            source += f", x {correction.ratio:.3g} as timed layers of other models have it"
        if stage.recoding is not None:
            source += f"; what {stage.recoding.word} adds is as on an H200"
        known = ("vector",) if machine.vector is not None else ()
        roofline = list_figures(machine, "hbm", "matmul", *known, "layer_overhead")
    computed = {"layers": sum(priced.layer_ps), "outside the layers": priced.outside_ps}
    if priced.drafting_ps:
        computed["prediction layers"] = priced.drafting_ps
    parts = [Input(name, to_seconds(ps), "s", source) for name, ps in computed.items()]
    yield seconds("compute", taken.compute_ps, " + ".join(computed), *parts, *roofline)
    reads = taken.times.uva_bytes
    read_by = {Backend.UVA: 0} | {b: size for b, size in taken.times.read_by.items() if size}
    read = {b.words.noun: size if reads else 0 for b, size in read_by.items()}
    later = {"brought for later": taken.times.later_bytes} if taken.times.later_bytes else {}
    crossing = list_sizes({"streamed": taken.copied_bytes, **read, **later})
    if priced.drafting_bytes:
        of_layers = "of what is read in place, the prediction layers'"
        crossing += (Input(of_layers, priced.drafting_bytes, "bytes"),)
    formula = f"{' + '.join(('streamed', *read, *later))}, re-reads included"
    is_step = priced.shapes[0].phase is Phase.DECODE
    for list_misses in MISSES if is_step else ():
        more = list_misses(placement, stage, priced.shapes[0].batch, machine, taken.times)
        formula, crossing = formula + more[0], (*crossing, *more[1])
    yield Term(f"{phase}.link_bytes", taken.link_bytes, "bytes", formula, crossing)
    copies = Input("copies", taken.num_copies, "count")
    formula = "copies x copy_latency + streamed / h2d"
    engine = stage.pass_rules
    slower: tuple[Input, ...] = ()
    if is_step and engine is not None and engine.beside_percent is not None:
        formula = f"slowdown beside layers x ({formula}) + copies x gap of a copy"
        slower = (
            Input("slowdown beside layers", engine.beside_percent / 100, "count", "fitted"),
            Input("gap of a copy", to_seconds(engine.copy_gap_ps), "s", "fitted"),
        )
    formula += " + "
    formula += " + ".join(f"{b.words.noun} / {b.rate_name}" for b in read_by)
    formula += "".join(f" + {name} / h2d" for name in later)
    rates = list_figures(machine, "copy_latency", "h2d")
    rates += tuple(show_figure(b.rate_name, b.rate(machine), "bytes_per_s") for b in read_by)
    yield seconds("link", taken.link_ps, formula, copies, *rates, *slower)
    awaited = Input("link waited for", to_seconds(taken.awaited_ps), "s")
    yield seconds("bound", taken.bound_ps, "max(compute, link waited for)", awaited)
    waits = [each for list_waits in WAITS for each in list_waits(taken.times, stage, machine)]
    slowdown = Input("slowdown of reading beside copies", taken.times.uva_slowdown, "count")
    # a thousand chunks are rounded by some nanoseconds
    waited_ps = taken.step_ps - taken.compute_ps if taken.step_ps > taken.compute_ps else 0
    yield seconds("stall", waited_ps, taken.waiting, *waits, *((slowdown,) if reads else ()))
    yield seconds("step", taken.step_ps, "compute + stall")
