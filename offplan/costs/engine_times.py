"""What prompts and steps take on engines whose copies end with the pass that they are part of.

offplan's own copies go on from one step to the next; vLLM and SGLang join them at a step's end, and
read each chunk of a prompt by a pass of its own. SGLang's captured decode steps copy and compute in
turns.

Source: vLLM 0.33, ``PrefetchOffloader.join_after_forward``; SGLang 0.5.23, ``_ModuleOffloader``.
"""

from typing import NamedTuple

from offplan.checkpoint.model import Model
from offplan.costs.compute import ModelCompute, PassCompute
from offplan.costs.predict import pass_times
from offplan.costs.timeline import price_joined, to_ps, to_seconds
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, place
from offplan.plan import Offload, Workload
from offplan.schedule import build_steady_request


class EngineTimes(NamedTuple):
    """Seconds of one request among many like it."""

    prefill_s: float
    decode_s: float
    """One step."""

    def request_s(self, workload: Workload) -> float:
        """Seconds of the prompt and of a step for each output token."""
        return self.prefill_s + workload.output_tokens * self.decode_s


def price_on_engine(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    offload: Offload,
    *,
    copies_in_turns: bool,
) -> EngineTimes:
    """Price a decision of one rule with one backend, or of none.

    ``model`` is as the engine loads it. With ``copies_in_turns`` captured decode steps copy a layer
    and compute it in turns, and what is to be read in place is copied as well, in any pass.

    Raises PlanError for rules that do not fit the model.
    """
    placement, compute = place(model, offload), ModelCompute(model, machine)
    request = build_steady_request(placement, len(model.layers))

    in_place = [slab.nbytes for slab in placement.slabs if slab.span(Phase.DECODE) is None]
    copied_ps = sum(to_ps(machine.copy_seconds(num_bytes)) for num_bytes in in_place)

    def price(priced: PassCompute, *, in_turns: bool = False) -> int:
        times = pass_times(placement, model, machine, priced)
        if copies_in_turns and in_place:
            return times.resident_ps + copied_ps
        # of one backend a prompt streams what a step does
        return price_joined(request.decode, times, in_turns=in_turns)

    chunks = prefill_shapes(workload, offload.prefill_chunk)
    prompt_ps = sum(price(compute.price(shape)) for shape in chunks)
    step_ps = price(compute.price(decode_shape(workload)), in_turns=copies_in_turns)
    return EngineTimes(to_seconds(prompt_ps), to_seconds(step_ps))
