"""What an offload decision is predicted to cost: memory terms, both phases, the objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from offplan.checkpoint.model import Model
from offplan.costs.compute import ModelCompute, PassCompute
from offplan.costs.link import uva_bytes_by_layer
from offplan.costs.memory import predict_gpu_memory
from offplan.costs.timeline import (
    PassTimes,
    PhaseTimes,
    price_decode,
    price_prefill,
    to_ps,
    to_seconds,
)
from offplan.costs.work import PassShape, decode_shape, prefill_shapes
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement, Span, place
from offplan.plan import Basis, Budget, Offload, Prediction, Workload
from offplan.schedule import RequestSchedule, build_request, empty_ring


@dataclass(frozen=True)
class PricedShape:
    """A pass's shape and its compute."""

    shape: PassShape
    compute: PassCompute


@dataclass(frozen=True)
class RequestTimes:
    """Both phases of one request."""

    prefill: PhaseTimes
    decode: PhaseTimes

    def objective_ps(self, output_tokens: int) -> Fraction:
        """Time of a request: the prompt, and a decode step for each output token."""
        return self.prefill.step_ps + output_tokens * self.decode.step_ps


def price_shapes(
    compute: ModelCompute, workload: Workload, prefill_chunk: int
) -> tuple[tuple[PricedShape, ...], PricedShape]:
    """Price the compute of a workload's passes: the prompt's chunks, and a decode step."""
    chunks = prefill_shapes(workload, prefill_chunk)
    decode = decode_shape(workload)
    return (
        tuple(PricedShape(shape, compute.price(shape)) for shape in chunks),
        PricedShape(decode, compute.price(decode)),
    )


def build_steady_request(placement: Placement, num_layers: int, num_chunks: int) -> RequestSchedule:
    """Order a request that finds the ring as an earlier, equal request left it."""
    first = build_request(placement, num_layers, num_chunks, empty_ring(placement))
    return build_request(placement, num_layers, num_chunks, first.decode.after)


def price_request(
    placement: Placement,
    model: Model,
    machine: MachineProfile,
    prefill: Sequence[PricedShape],
    decode: PricedShape,
) -> RequestTimes:
    """Price the schedules of one request among many like it."""

    def copy_ps(span: Span) -> int:
        return to_ps(machine.copy_seconds(span.nbytes))

    def times(priced: PricedShape) -> PassTimes:
        num_layers = len(model.layers)
        read = uva_bytes_by_layer(placement, model.experts, num_layers, priced.shape)
        return PassTimes(
            compute_ps=tuple(to_ps(time.seconds) for time in priced.compute.layers),
            outside_ps=to_ps(priced.compute.outside.seconds),
            uva_ps=tuple(to_ps(num_bytes / machine.uva.value) for num_bytes in read),
            uva_bytes=sum(read),
            copy_ps=copy_ps,
        )

    request = build_steady_request(placement, len(model.layers), len(prefill))
    return RequestTimes(
        price_prefill(request.prefill, [times(chunk) for chunk in prefill]),
        price_decode(request.decode, times(decode)),
    )


def predict(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    offload: Offload,
) -> Prediction:
    """Predict what an offload decision costs, whether or not it keeps the budget.

    The budget only sets the memory margin. Raises PlanError for rules that do not fit the model.
    """
    placement = place(model, offload)
    compute = ModelCompute(model, machine)
    chunks, decode = price_shapes(compute, workload, offload.prefill_chunk)
    times = price_request(placement, model, machine, chunks, decode)
    measured = all(priced.compute.measured for priced in (*chunks, decode))
    return Prediction(
        objective=to_seconds(times.objective_ps(workload.output_tokens)),
        basis=Basis.MEASURED if measured else Basis.ESTIMATED,
        prefill=times.prefill.predict(),
        decode=times.decode.predict(),
        gpu_memory=predict_gpu_memory(
            placement, model, machine, workload, budget, offload.prefill_chunk
        ),
        host_memory=placement.offloaded_bytes,
    )
