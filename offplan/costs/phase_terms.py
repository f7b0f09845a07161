"""Costs of a phase, term by term."""

from collections.abc import Iterator
from fractions import Fraction

from offplan.backends import Backend
from offplan.checkpoint.model_types import SHARED_BEHIND
from offplan.costs.capabilities import WAITS
from offplan.costs.compute import MATMUL_EFFICIENCY, PassCompute
from offplan.costs.kept_experts import KeptUse, list_use
from offplan.costs.term import Input, Term, list_figures, list_sizes, show_figure
from offplan.costs.timeline import PhaseTimes, to_seconds
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase

MISSED = (
    "mean of max(products meanwhile, link, host's cores) - products meanwhile - link + DIVIDING_S"
)
"""Formula of a layer's wait for missed experts that the host's cores and the link divide."""


def list_phase(
    stage: Stage,
    machine: MachineProfile,
    priced: PassCompute,
    taken: PhaseTimes,
    use: KeptUse | None = None,
) -> Iterator[Term]:
    """List the terms of a phase: its step is what it computes and what it waits.

    ``use`` is what it finds of experts that are kept one by one, if any are.
    """

    phase = priced.shapes[0].phase.value

    def seconds(name: str, time_ps: Fraction | int, formula: str, *inputs: Input) -> Term:
        return Term(f"{phase}.{name}", to_seconds(time_ps), "s", formula, inputs)

    source = "measured on the machine, at these shapes"
    roofline: tuple[Input, ...] = ()
    if not priced.measured:
        source = f"roofline, of which matmul counts {MATMUL_EFFICIENCY:g}, or scaled from it"
        if stage.recoding is not None:
            source += f"; what {stage.recoding.word} adds is as on an H200"
        roofline = list_figures(machine, "hbm", "matmul", "layer_overhead")
    computed = {"layers": sum(priced.layer_ps), "outside the layers": priced.outside_ps}
    parts = [Input(name, to_seconds(ps), "s", source) for name, ps in computed.items()]
    yield seconds("compute", taken.compute_ps, " + ".join(computed), *parts, *roofline)
    reads = taken.times.uva_bytes
    read_by = {Backend.UVA: 0} | {b: size for b, size in taken.times.read_by.items() if size}
    read = {b.words.noun: size if reads else 0 for b, size in read_by.items()}
    crossing = list_sizes({"streamed": taken.copied_bytes, **read})
    formula = f"streamed + {' + '.join(read)}, re-reads included"
    if use is not None:
        formula += ", and experts missed x bytes of an expert"
        formula += ", less what the host's cores read" if taken.times.missed_ps else ""
    inputs = (*crossing, *list_use(use))
    yield Term(f"{phase}.link_bytes", taken.link_bytes, "bytes", formula, inputs)
    copies = Input("copies", taken.num_copies, "count")
    formula = "copies x copy_latency + streamed / h2d"
    engine = stage.pass_rules
    slower: tuple[Input, ...] = ()
    is_step = priced.shapes[0].phase is Phase.DECODE
    if is_step and engine is not None and engine.beside_percent is not None:
        formula = f"slowdown beside layers x ({formula}) + copies x gap of a copy"
        slower = (
            Input("slowdown beside layers", engine.beside_percent / 100, "count", "fitted"),
            Input("gap of a copy", to_seconds(engine.copy_gap_ps), "s", "fitted"),
        )
    formula += " + "
    formula += " + ".join(f"{b.words.noun} / {b.rate_name}" for b in read_by)
    rates = list_figures(machine, "copy_latency", "h2d")
    rates += tuple(show_figure(b.rate_name, b.rate(machine), "bytes_per_s") for b in read_by)
    yield seconds("link", taken.link_ps, formula, copies, *rates, *slower)
    awaited = Input("link waited for", to_seconds(taken.link_ps - taken.later_ps), "s")
    yield seconds("bound", taken.bound_ps, "max(compute, link waited for)", awaited)
    keeping = sum(taken.times.keeping_ps)
    kept: tuple[Input, ...] = (
        (Input("kernels that keep experts", to_seconds(keeping), "s"),) if keeping else ()
    )
    for list_waits in WAITS:
        kept += (*list_waits(taken.times),)
    if taken.times.cores_products:
        threads = machine.host_threads
        formula = "round trips x cores_round_trip + bytes / cores, beside copies where it copies"
        if stage.model.model_type in SHARED_BEHIND:
            formula += ", less shared experts / hbm where they are multiplied meanwhile"
        name, waiting = "host's cores", sum(taken.times.cores_ps)
        if taken.times.missed_ps:
            name += ", beyond what is hidden"
            formula = "of each layer " + MISSED if not waiting else f"{formula}; of missed {MISSED}"
            waiting += sum(taken.times.missed_ps)
        kept += (
            Input(name, to_seconds(waiting), "s", formula),
            Input("round trips", taken.times.cores_products, "count"),
            show_figure("cores_round_trip", machine.cores_trip, "s"),
            Input("bytes read by the host's cores", taken.times.cores_bytes, "bytes"),
            show_figure("cores", machine.cores_rate, "bytes_per_s"),
            show_figure("cores_beside_copies", machine.cores_rate_beside, "bytes_per_s"),
            *((show_figure("host_threads", threads, "count"),) if threads else ()),
        )
    slowdown = Input("slowdown of reading beside copies", taken.times.uva_slowdown, "count")
    waited_ps = taken.step_ps - taken.compute_ps
    yield seconds("stall", waited_ps, taken.waiting, *kept, *((slowdown,) if reads else ()))
    yield seconds("step", taken.step_ps, "compute + stall")
