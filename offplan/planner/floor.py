"""The floor: what no plan for this budget can beat."""

from dataclasses import dataclass

from offplan.costs.timeline import to_seconds
from offplan.plan import Budget
from offplan.planner.space import Space, find_room


@dataclass(frozen=True)
class Floor:
    """The least that any plan of this budget must move, and the time that takes.

    Real plans pay for the ring, for whole layers or parameters, and for what does not overlap.
    """

    missing_bytes: int
    """Bytes of weights that the GPU cannot hold beside KV cache, activations and overhead."""
    decode_link_bytes: int
    """Bytes that cross the link in a decode step, at least."""
    prefill_link_bytes: int
    """Bytes that cross while a prompt is read, at least."""
    decode_s: float
    prefill_s: float
    objective_s: float
    """Seconds of a request."""


def find_floor(space: Space, budget: Budget) -> Floor:
    """Find the floor of a budget.

    What is not on the GPU when a pass starts must cross before it ends, if the pass reads it. What
    is read least is missing first: rows of the input embedding, then routed experts (uniform
    routing). Memory is taken from the chunks that need least, compute from the fastest.
    """
    machine, workload = space.machine, space.question.workload
    pairs = zip(space.settings, find_room(space, budget).lacking_bytes.tolist(), strict=True)
    missing = max(0, min(lacking for each, lacking in pairs if each.embeddings == "device"))
    rate = max(machine.h2d.value, machine.uva.value)
    decode_bytes = _least_read(space, missing, workload.batch)
    prefill_bytes = _least_read(space, missing, workload.batch * workload.prompt_tokens)
    decode_s = max(to_seconds(space.decode.resident_ps), decode_bytes / rate)
    compute_ps = min(setting.prefill.resident_ps for setting in space.settings)
    prefill_s = max(to_seconds(compute_ps), prefill_bytes / rate)
    first, second = space.weights
    return Floor(
        missing_bytes=missing,
        decode_link_bytes=decode_bytes,
        prefill_link_bytes=prefill_bytes,
        decode_s=decode_s,
        prefill_s=prefill_s,
        objective_s=first * prefill_s + second * decode_s,
    )


def _least_read(space: Space, missing_bytes: int, num_tokens: int) -> int:
    """Bytes of the missing ones that a pass reads, if those read least are missing."""
    model, read, left = space.question.model, 0.0, missing_bytes
    embedding, experts = model.input_embedding, model.experts
    if embedding is not None:
        rows = min(left, embedding.nbytes)
        read += rows * min(1.0, num_tokens / embedding.shape[0])
        left -= rows
    if experts is not None:
        routed = min(left, sum(layer.expert_bytes for layer in model.layers))
        read += routed * experts.touched(num_tokens) / experts.num_experts
        left -= routed
    return int(read) + left
