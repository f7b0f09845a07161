"""One request priced exactly, by running the schedules of its passes one operation at a time."""

from dataclasses import replace
from fractions import Fraction

from offplan.costs.compute import PassCompute
from offplan.costs.engine_times import build_engine_pass, engine_pass_times
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import Time, price_decode, price_prefill, run_step
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.schedule import build_steady_request


def run_request(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    prefill: PassCompute,
    decode: PassCompute,
) -> tuple[Fraction, Fraction]:
    """Return picoseconds of the prompt and of a decode step."""
    engine = stage.runner.pass_rules
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
    step_ps = step_times.resident_ps + sum(step_times.uva_ps)
    step_ps += sum(step_times.copy_ps(span) for span in passes[Phase.DECODE].copied_spans)
    schedule, num_passes = passes[Phase.PREFILL], len(prefill.shapes)
    prompt_ps = prompt_times.resident_ps + sum(prompt_times.uva_ps)
    if schedule.link_bytes:
        of_one = replace(
            prompt_times,
            compute_ps=tuple(-(-each // num_passes) for each in prompt_times.compute_ps),
            uva_ps=tuple(-(-each // num_passes) for each in prompt_times.uva_ps),
            outside_ps=0,
        )
        state: list[Time] = [0] * (2 + len(schedule.before))
        run_step(schedule, of_one, state)
        prompt_ps = num_passes * int(max(state[:2])) + prompt_times.outside_ps
    return Fraction(prompt_ps), Fraction(step_ps)
