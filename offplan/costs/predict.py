"""What an offload decision is predicted to cost: memory terms, both phases, the objective."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from offplan.checkpoint.model import Model
from offplan.costs.compute import ModelCompute
from offplan.costs.link import embedding_bytes, uva_bytes_by_layer, uva_slowdown
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
from offplan.schedule import build_steady_request


@dataclass(frozen=True)
class PricedPass:
    """The compute of one pass over the layers, in picoseconds: a decode step, or a whole prompt."""

    shapes: tuple[PassShape, ...]
    """Of its chunks, which go through each layer one after another; a decode step is one."""
    layer_ps: tuple[int, ...]
    """By layer, all chunks, with everything resident."""
    outside_ps: int
    """Of the last chunk alone: only the prompt's last token reaches the head."""
    measured: bool
    """Whether all of it was measured."""

    @cached_property
    def resident_ps(self) -> int:
        """The whole pass with everything resident."""
        return sum(self.layer_ps) + self.outside_ps


@dataclass(frozen=True)
class RequestTimes:
    """Both phases of one request."""

    prefill: PhaseTimes
    decode: PhaseTimes

    def objective_ps(self, output_tokens: int) -> Fraction:
        """Time of a request: the prompt, and a decode step for each output token."""
        return self.prefill.step_ps + output_tokens * self.decode.step_ps


def price_prompt(compute: ModelCompute, workload: Workload, prefill_chunk: int) -> PricedPass:
    """Price the compute of the pass that reads a workload's prompt."""
    return _price_pass(compute, prefill_shapes(workload, prefill_chunk))


def price_step(compute: ModelCompute, workload: Workload) -> PricedPass:
    """Price the compute of a workload's decode step."""
    return _price_pass(compute, (decode_shape(workload),))


def _price_pass(compute: ModelCompute, shapes: tuple[PassShape, ...]) -> PricedPass:
    chunks = [compute.price(shape) for shape in shapes]
    by_layer = zip(*(chunk.layers for chunk in chunks), strict=True)
    return PricedPass(
        shapes,
        layer_ps=tuple(sum(to_ps(time.seconds) for time in times) for times in by_layer),
        outside_ps=to_ps(chunks[-1].outside.seconds),
        measured=all(chunk.measured for chunk in chunks),
    )


def price_request(
    placement: Placement,
    model: Model,
    machine: MachineProfile,
    prefill: PricedPass,
    decode: PricedPass,
) -> RequestTimes:
    """Price the schedules of one request among many like it."""

    def copy_ps(span: Span) -> int:
        return to_ps(machine.copy_seconds(span.nbytes))

    def times(priced: PricedPass) -> PassTimes:
        num_layers = len(model.layers)
        read = uva_bytes_by_layer(placement, machine, model.experts, num_layers, priced.shapes)
        rows = embedding_bytes(placement.host_embedding, priced.shapes)
        first_ps, *rest_ps = (to_ps(num_bytes / machine.uva.value) for num_bytes in read)
        return PassTimes(
            compute_ps=priced.layer_ps,
            outside_ps=priced.outside_ps,
            # embedding rows are read just before the first layer, and count as its reading
            uva_ps=(first_ps + to_ps(rows / machine.uva.value), *rest_ps),
            uva_slowdown=uva_slowdown(machine),
            uva_bytes=sum(read) + rows,
            copy_ps=copy_ps,
        )

    request = build_steady_request(placement, len(model.layers))
    return RequestTimes(
        price_prefill(request.prefill, times(prefill)),
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
    prompt = price_prompt(compute, workload, offload.prefill_chunk)
    decode = price_step(compute, workload)
    times = price_request(placement, model, machine, prompt, decode)
    on_peer = placement.slab_bytes if offload.store == "peer" else 0
    return Prediction(
        objective=to_seconds(times.objective_ps(workload.output_tokens)),
        basis=Basis.MEASURED if prompt.measured and decode.measured else Basis.ESTIMATED,
        prefill=times.prefill.predict(),
        decode=times.decode.predict(),
        gpu_memory=predict_gpu_memory(
            placement, model, machine, workload, budget, offload.prefill_chunk
        ),
        host_memory=placement.offloaded_bytes - on_peer,
        peer_memory=on_peer,
    )
