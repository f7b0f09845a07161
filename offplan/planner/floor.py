"""The floor: what no plan for this budget can beat."""

from dataclasses import dataclass

from offplan.costs.timeline import to_seconds
from offplan.planner.problem import Problem


@dataclass(frozen=True)
class Floor:
    """The least that any plan of this budget must move, and the time that takes.

    Embeddings, norm and head are resident in every plan, so nothing is saved on them. Real plans
    pay for the ring, for whole layers or parameters, and for what does not overlap.
    """

    missing_bytes: int
    """Weights that the GPU cannot hold beside KV cache, activations and overhead."""
    decode_link_bytes: int
    """That cross the link in a decode step, at least."""
    prefill_link_bytes: int
    """That cross while a prompt is read, at least."""
    decode_s: float
    prefill_s: float
    objective_s: float
    """Of a request."""


def find_floor(problem: Problem) -> Floor:
    """Find the floor of a budget.

    What is not on the GPU when a pass starts must cross before it ends, if the pass reads it. The
    routed experts are read least, so they are what is missing first; uniform routing. Memory is
    taken from the chunking that needs least, compute from the one that is fastest.
    """
    model, machine = problem.model, problem.machine
    limit = max(chunking.weight_limit_bytes for chunking in problem.chunkings)
    missing = max(0, model.loaded_bytes - limit)
    rate = max(machine.h2d.value, machine.uva.value)
    decode_bytes = _least_read(problem, missing, problem.workload.batch)
    prompt_tokens = problem.workload.batch * problem.workload.prompt_tokens
    prefill_bytes = _least_read(problem, missing, prompt_tokens)
    decode_s = max(to_seconds(problem.decode.resident_ps), decode_bytes / rate)
    compute_ps = min(chunking.prefill.resident_ps for chunking in problem.chunkings)
    prefill_s = max(to_seconds(compute_ps), prefill_bytes / rate)
    return Floor(
        missing_bytes=missing,
        decode_link_bytes=decode_bytes,
        prefill_link_bytes=prefill_bytes,
        decode_s=decode_s,
        prefill_s=prefill_s,
        objective_s=prefill_s + problem.workload.output_tokens * decode_s,
    )


def _least_read(problem: Problem, missing_bytes: int, num_tokens: int) -> int:
    experts = problem.model.experts
    if experts is None:
        return missing_bytes
    routed = min(missing_bytes, sum(layer.expert_bytes for layer in problem.model.layers))
    share = experts.touched(num_tokens) / experts.num_experts
    return round(share * routed) + missing_bytes - routed
