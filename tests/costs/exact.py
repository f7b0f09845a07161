"""One request priced exactly, by running the schedules of its passes one operation at a time."""

from dataclasses import replace
from fractions import Fraction

from offplan.costs.engine_times import build_engine_pass, engine_pass_times
from offplan.costs.pass_compute import PassCompute
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import PassTimes, Time, price_decode, price_prefill, run_step
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.schedule import Schedule, build_steady_request


def run_request(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    prefill: PassCompute,
    decode: PassCompute,
) -> tuple[Fraction, Fraction]:
    """Return picoseconds of the prompt and of a decode step."""
    engine = stage.pass_rules
    if engine is None:
        num_chunks = len(prefill.shapes)
        request = build_steady_request(placement, len(stage.layers), num_chunks=num_chunks)
        prompt_times, step_times = (
            pass_times(placement, stage, machine, each) for each in (prefill, decode)
        )
        return (
            price_prefill(request.prefill, prompt_times).step_ps,
            price_decode(request.decode, step_times).step_ps,
        )
    prompt_times, step_times = (
        engine_pass_times(engine, placement, stage, machine, each) for each in (prefill, decode)
    )
    passes = {
        phase: build_engine_pass(engine, placement, len(stage.layers), phase) for phase in Phase
    }
    prompt_ps = _run_passes(passes[Phase.PREFILL], prompt_times, len(prefill.shapes))
    if engine.beside_percent is not None:
        return Fraction(prompt_ps), Fraction(_run_passes(passes[Phase.DECODE], step_times, 1))
    step_ps = step_times.resident_ps + sum(step_times.uva_ps)
    step_ps += sum(step_times.copy_ps(span) for span in passes[Phase.DECODE].copied_spans)
    return Fraction(prompt_ps), Fraction(step_ps)


def _run_passes(schedule: Schedule, times: PassTimes, num_passes: int) -> int:
    """Run a phase of equal passes on an engine, each of which ends with its copies."""
    if not schedule.link_bytes:
        return times.resident_ps + sum(times.uva_ps)
    of_one = replace(
        times,
        compute_ps=tuple(-(-each // num_passes) for each in times.compute_ps),
        uva_ps=tuple(-(-each // num_passes) for each in times.uva_ps),
        uva_slowdown=1.0,
        outside_ps=0,
    )
    state: list[Time] = [0] * (2 + len(schedule.before))
    run_step(schedule, of_one, state)
    return num_passes * int(max(state[:2])) + times.outside_ps
