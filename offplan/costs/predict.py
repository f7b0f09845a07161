"""What an offload decision is predicted to cost: memory terms, both phases, the objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from offplan.costs.compute import ModelCompute, PassCompute
from offplan.costs.engine_times import price_engine_prompt, price_engine_step
from offplan.costs.memory import predict_gpu_memory
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import PhaseTimes, price_decode, price_prefill, to_seconds
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.held.held import Held
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement, place
from offplan.plan import Budget, Offload, PhasePrediction, Prediction, Workload
from offplan.ranks import ONE_RANK
from offplan.schedule import build_steady_request


@dataclass(frozen=True)
class RequestTimes:
    """What both phases of one request take."""

    prefill: PhaseTimes
    decode: PhaseTimes

    def objective_ps(self, workload: Workload) -> Fraction:
        """Picoseconds of a request: the prompt, which gives the first token, and decode steps."""
        return self.prefill.step_ps + workload.num_steps * self.decode.step_ps


def price_request(
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    prefill: PassCompute,
    decode: PassCompute,
) -> RequestTimes:
    """Price one request among many like it, by what runs the model."""
    engine = stage.runner.pass_rules
    if engine is not None:
        return RequestTimes(
            price_engine_prompt(engine, placement, stage, machine, prefill),
            price_engine_step(engine, placement, stage, machine, decode),
        )
    request = build_steady_request(placement, len(stage.layers))
    return RequestTimes(
        price_prefill(request.prefill, pass_times(placement, stage, machine, prefill)),
        price_decode(request.decode, pass_times(placement, stage, machine, decode)),
    )


def predict(
    held: Held,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    offload: Offload,
) -> Prediction:
    """Predict what an offload decision costs, whether or not it keeps the budget.

    The budget only sets the memory margin. Of what one of several ranks holds, host memory is that
    of all ranks; a pass goes through the stages of a pipeline one after the other, and GPU memory
    is that of the stage that takes most. Raises PlanError for rules that do not fit the model.
    """
    predictions = [
        predict_stage(stage, machine, workload, budget, offload) for stage in held.stages
    ]
    if held.ranks == ONE_RANK:
        return predictions[0]
    largest = max(predictions, key=lambda each: each.gpu_memory.total_bytes)
    return largest.model_copy(
        update={
            "objective_s": sum(each.objective_s for each in predictions),
            "prefill": _add_up([each.prefill for each in predictions]),
            "decode": _add_up([each.decode for each in predictions]),
            "host_memory_bytes": held.ranks.tensor
            * sum(each.host_memory_bytes for each in predictions),
        }
    )


def _add_up(stages: Sequence[PhasePrediction]) -> PhasePrediction:
    """Add up what a pass takes in one stage after the other."""
    sums = {
        name: sum(getattr(each, name) for each in stages) for name in type(stages[0]).model_fields
    }
    return stages[0].model_copy(update=sums)


def predict_stage(
    stage: Stage, machine: MachineProfile, workload: Workload, budget: Budget, offload: Offload
) -> Prediction:
    """Predict what one rank of one stage takes, or the only GPU."""
    placement = place(stage, offload)
    compute = ModelCompute(stage, machine)
    prompt = compute.price(*prefill_shapes(workload, offload.prefill_chunk))
    decode = compute.price(decode_shape(workload))
    times = price_request(placement, stage, machine, prompt, decode)
    on_peer = placement.slab_bytes if offload.store == "peer" else 0
    return Prediction(
        objective=to_seconds(times.objective_ps(workload)),
        basis="measured" if prompt.measured and decode.measured else "estimated",
        prefill=times.prefill.predict(),
        decode=times.decode.predict(),
        gpu_memory=predict_gpu_memory(
            placement, stage, machine, workload, budget, offload.prefill_chunk
        ),
        host_memory=placement.offloaded_bytes - on_peer,
        peer_memory=on_peer,
    )
