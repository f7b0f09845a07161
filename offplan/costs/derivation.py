"""Where each number of a prediction comes from: its formula, and what goes into it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offplan.backends import Backend, Figure
from offplan.costs.activations import coded_experts_bytes, phase_bytes, scratch_bytes
from offplan.costs.compute import MATMUL_EFFICIENCY, ModelCompute, PassCompute
from offplan.costs.engine_times import build_engine_pass, engine_pass_times
from offplan.costs.memory import MARGIN, kv_cache_bytes
from offplan.costs.pass_times import pass_times
from offplan.costs.predict import predict, predict_stage
from offplan.costs.timeline import to_seconds
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.held.held import Held
from offplan.held.packing import is_packed
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, place
from offplan.plan import PhasePrediction, Plan
from offplan.schedule import Copy, Schedule, build_steady_request

UnitName = Literal["bytes", "s", "bytes_per_s", "flops_per_s", "count"]


_TIMELINE = "the timeline of {}: layers in order, copies in order as slots get free, waits"
_STEPS = {
    (False, Phase.PREFILL): _TIMELINE.format("the schedule"),
    (False, Phase.DECODE): _TIMELINE.format("the schedule"),
    (True, Phase.PREFILL): _TIMELINE.format("a pass for each chunk, which its copies end"),
    (True, Phase.DECODE): "compute + link: the engine's captured steps copy and compute in turns",
}
"""How a phase's time follows, on engines and not."""


@dataclass(frozen=True)
class Input:
    """A number that goes into another one."""

    name: str
    value: float
    unit: UnitName
    source: str | None = None
    """How it was obtained and where, if it is a figure of the machine; else it follows from model,
    workload and decision."""


@dataclass(frozen=True)
class Term:
    """A number of a prediction."""

    path: str
    """Where it stands in the plan's file, below ``prediction``: ``decode.link``. What is of one
    stage of a pipeline alone has the stage before it: ``stages.0.decode.link``."""
    value: float
    unit: UnitName
    formula: str
    """How it follows from the inputs, by their names and those of other terms."""
    inputs: tuple[Input, ...]


def derive_prediction(held: Held, machine: MachineProfile, plan: Plan) -> tuple[Term, ...]:
    """Derive every number that a plan's decision is predicted to cost on a machine.

    ``held`` is as the plan's runner holds the model; ``machine`` has the link to the plan's store.
    Raises PlanError for rules that do not fit the model.
    """
    stages = [_derive_stage(stage, machine, plan) for stage in held.stages]
    terms = stages[0] if len(stages) == 1 else tuple(_join(stages))
    prediction = predict(held, machine, plan.workload, plan.budget, plan.offload)
    objective = Term(
        "objective",
        prediction.objective_s,
        "s",
        "prefill.step + (output tokens - 1) x decode.step",
        (Input("output tokens", plan.workload.output_tokens, "count"),),
    )
    return (*terms, objective)


def _derive_stage(stage: Stage, machine: MachineProfile, plan: Plan) -> tuple[Term, ...]:
    """Derive what a rank of one stage takes, or the only GPU; of host memory all of the stage."""
    workload, offload = plan.workload, plan.offload
    placement = place(stage, offload)
    prediction = predict_stage(stage, machine, workload, plan.budget, offload)
    prompt_schedule, step_schedule = _schedules(placement, stage)
    compute = ModelCompute(stage, machine)
    prompt = compute.price(*prefill_shapes(workload, offload.prefill_chunk))
    step = compute.price(decode_shape(workload))
    return (
        *_derive_memory(stage, machine, plan, placement),
        _derive_host_memory(plan, placement),
        *_derive_phase(placement, stage, machine, prompt, prompt_schedule, prediction.prefill),
        *_derive_phase(placement, stage, machine, step, step_schedule, prediction.decode),
    )


def _join(stages: Sequence[tuple[Term, ...]]) -> Iterator[Term]:
    """Join the stages of a pipeline: one GPU's memory is the most of any, all else adds up."""
    for number, terms in enumerate(stages):
        yield from (replace(term, path=f"stages.{number}.{term.path}") for term in terms)
    totals = [next(t.value for t in terms if t.path == "gpu_memory.total") for terms in stages]
    largest = totals.index(max(totals))
    for same in zip(*stages, strict=True):
        path, unit = same[0].path, same[0].unit
        if path.startswith("gpu_memory."):
            formula = f"that of stage {largest}, whose GPUs hold most"
            yield Term(path, same[largest].value, unit, formula, ())
        else:
            inputs = tuple(Input(f"stage {n}", t.value, unit) for n, t in enumerate(same))
            yield Term(path, sum(t.value for t in same), unit, "the sum of all stages", inputs)


def _schedules(placement: Placement, stage: Stage) -> tuple[Schedule, Schedule]:
    """Return the schedules of a prompt and of a decode step; on engines that of one chunk."""
    num_layers = len(stage.layers)
    engine = stage.runner.pass_rules
    if engine is not None:
        prompt, step = (build_engine_pass(engine, placement, num_layers, each) for each in Phase)
        return prompt, step
    request = build_steady_request(placement, num_layers)
    return request.prefill, request.decode


def _derive_memory(
    stage: Stage, machine: MachineProfile, plan: Plan, placement: Placement
) -> Iterator[Term]:
    workload, chunk = plan.workload, plan.offload.prefill_chunk
    embedding = placement.host_embedding.nbytes if placement.host_embedding is not None else 0
    taken = stage.loaded_bytes - embedding - placement.resident_bytes
    packed = [p for p in stage.parameters if is_packed(p)]
    saved = sum(sum(tensor.nbytes for tensor in p.unpacked) - p.nbytes for p in packed)
    less = " - what packing saves" if packed else ""
    total = 0.0

    def term(name: str, value: float, formula: str, *inputs: Input) -> Term:
        nonlocal total
        total += value
        return Term(f"gpu_memory.{name}", value, "bytes", formula, inputs)

    yield term(
        "resident",
        stage.loaded_bytes - taken - embedding,
        f"weights{less} - what rules take - embedding on the host",
        Input("weights", stage.loaded_bytes + saved, "bytes"),
        *([Input("what packing saves", saved, "bytes")] if packed else []),
        Input("what rules take", taken, "bytes"),
        Input("embedding on the host", embedding, "bytes"),
    )
    yield term(
        "ring",
        placement.num_slots * placement.slot_bytes,
        "slots x largest span",
        Input("slots", placement.num_slots, "count"),
        Input("largest span", placement.slot_bytes, "bytes"),
    )
    of_token = sum(layer.kv_cache.bytes_per_token for layer in stage.layers)
    state = sum(layer.kv_cache.state_bytes for layer in stage.layers)
    kept = stage.cache_bytes(workload)
    blocks = kv_cache_bytes(stage, workload, chunk) - kept
    yield term(
        "kv_cache",
        kept + blocks,
        "batch x (context x bytes a token + state of linear attention) + an engine's blocks",
        Input("batch", workload.batch, "count"),
        Input("context", workload.context, "count"),
        Input("bytes a token", of_token, "bytes"),
        Input("state of linear attention", state, "bytes"),
        Input("an engine's blocks", blocks, "bytes"),
    )
    (prompt, step), scratch = phase_bytes(stage, workload, chunk), scratch_bytes(stage)
    coded = coded_experts_bytes(stage)
    yield term(
        "activations",
        max(prompt, step) + step + scratch + coded,
        "max(temporaries of a prompt, of a step) + of a step, for captured graphs, + scratch + of "
        "experts stored as codes",
        Input("temporaries of a prompt", prompt, "bytes"),
        Input("temporaries of a step", step, "bytes"),
        Input("scratch", scratch, "bytes"),
        Input("of experts stored as codes", coded, "bytes"),
    )
    margin = round(MARGIN * plan.budget.gpu_memory)
    yield term(
        "overhead",
        machine.gpu_overhead.value + margin,
        f"gpu_overhead + {MARGIN:.1%} of the budget",
        _figure(machine, "gpu_overhead", "bytes"),
        Input("budget", plan.budget.gpu_memory, "bytes"),
    )
    yield Term("gpu_memory.total", total, "bytes", "the sum of these", ())
    if plan.offload.store == "peer":
        slabs = Input("slabs, each tensor on a boundary", placement.slab_bytes, "bytes")
        yield Term("peer_memory", placement.slab_bytes, "bytes", "slabs", (slabs,))


def _derive_host_memory(plan: Plan, placement: Placement) -> Term:
    on_host, num_ranks = plan.offload.store == "host", plan.goal.ranks.tensor
    embedding = placement.host_embedding.nbytes if placement.host_embedding is not None else 0
    slabs = placement.slab_bytes if on_host else 0
    told = "slabs, each tensor on a boundary" if on_host else "slabs on the host"
    formula = "slabs + embedding on the host"
    inputs = [Input(told, slabs, "bytes"), Input("embedding on the host", embedding, "bytes")]
    if num_ranks > 1:
        formula = f"({formula}) x ranks"
        inputs.append(Input("ranks", num_ranks, "count"))
    return Term("host_memory", num_ranks * (slabs + embedding), "bytes", formula, tuple(inputs))


def _derive_phase(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    priced: PassCompute,
    schedule: Schedule,
    prediction: PhasePrediction,
) -> Iterator[Term]:
    phase = schedule.phase.value
    engine = stage.runner.pass_rules
    if engine is None:
        num_passes, times = 1, pass_times(placement, stage, machine, priced)
    else:
        num_passes = len(priced.shapes)
        times = engine_pass_times(engine, placement, stage, machine, priced)
    num_copies = sum(isinstance(operation, Copy) for operation in schedule.operations)
    copied_bytes, read_by = num_passes * schedule.link_bytes, times.read_by
    if engine is not None and engine.copies_in_place:
        num_copies += sum(slab.span(schedule.phase) is None for slab in placement.slabs)
        copied_bytes, read_by = copied_bytes + times.uva_bytes, {}
    layers_s, outside_s = to_seconds(sum(priced.layer_ps)), to_seconds(priced.outside_ps)
    source = "measured on the machine, at these shapes"
    if not priced.measured:
        source = f"roofline, of which matmul counts {MATMUL_EFFICIENCY:g}, or scaled from it"
        if any(is_packed(p) for layer in stage.layers for p in layer.parameters):
            source += "; what packing adds is as on an H200"
    yield Term(
        f"{phase}.compute",
        layers_s + outside_s,
        "s",
        "layers + outside the layers",
        (
            Input("layers", layers_s, "s", source),
            Input("outside the layers", outside_s, "s", source),
            *(
                ()
                if priced.measured
                else (
                    _figure(machine, "hbm", "bytes_per_s"),
                    _figure(machine, "matmul", "flops_per_s"),
                    _figure(machine, "layer_overhead", "s"),
                )
            ),
        ),
    )
    streamed = Input("streamed", copied_bytes, "bytes")
    read = {Backend.UVA: 0} | {each: size for each, size in read_by.items() if size}
    inputs = [Input(each.words.noun, size, "bytes") for each, size in read.items()]
    rates = {each: each.rate(machine) for each in read}
    is_step = schedule.phase is Phase.DECODE
    repeats = engine is not None and engine.copies_first_again and is_step and schedule.link_bytes
    again = " (those copied ahead twice)" if repeats else ""
    yield Term(
        f"{phase}.link_bytes",
        streamed.value + sum(read.values()),
        "bytes",
        f"streamed{again} + {' + '.join(each.name for each in inputs)}, re-reads included",
        (streamed, *inputs),
    )
    yield Term(
        f"{phase}.link",
        num_passes * num_copies * machine.copy_latency.value
        + streamed.value / machine.h2d.value
        + sum(size / rates[each].value for each, size in read.items()),
        "s",
        "copies x copy_latency + streamed / h2d + "
        + " + ".join(f"{each.words.noun} / {each.rate_name}" for each in read),
        (
            Input("copies", num_passes * num_copies, "count"),
            _figure(machine, "copy_latency", "s"),
            _figure(machine, "h2d", "bytes_per_s"),
            *(_figure_input(b.rate_name, rate, "bytes_per_s") for b, rate in rates.items()),
        ),
    )
    is_own_prompt = schedule.phase is Phase.PREFILL and engine is None
    waited = " of what the prompt waits for" if is_own_prompt else ""
    yield Term(f"{phase}.bound", prediction.bound_s, "s", f"max(compute, link{waited})", ())
    yield Term(
        f"{phase}.step",
        prediction.step_s,
        "s",
        _STEPS[engine is not None, schedule.phase],
        (
            Input("operations", len(schedule.operations), "count"),
            Input("reading beside copies takes, as a multiple", times.uva_slowdown, "count"),
        ),
    )
    yield Term(f"{phase}.stall", prediction.stall_s, "s", "step - compute", ())


def _figure(machine: MachineProfile, name: str, unit: UnitName) -> Input:
    """Name a figure of the machine with its basis and source."""
    return _figure_input(name, getattr(machine, name), unit)


def _figure_input(name: str, figure: Figure, unit: UnitName) -> Input:
    return Input(name, figure.value, unit, f"{figure.basis}: {figure.source}")
