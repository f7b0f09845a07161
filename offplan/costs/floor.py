"""The floor: what no plan for this budget can beat."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offplan.backends import BACKENDS, Backend
from offplan.costs.timeline import to_seconds
from offplan.drafts.mix import ONE_BY_ONE, Mix
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.plan import Workload
from offplan.routing.profile import BatchReuse


@dataclass(frozen=True)
class Floor:
    """The least that any plan of this budget must move, and the time that takes.

    Real plans also take time and memory for the ring, for whole layers or parameters, and for what
    does not overlap.
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


def find_floor(
    ways: Sequence[tuple[Stage, int]],
    machine: MachineProfile,
    workload: Workload,
    resident_ps: tuple[int, int],
    elsewhere_ps: tuple[int, int] = (0, 0),
    beside: Iterable[Backend] = (),
    mix: Mix = ONE_BY_ONE,
) -> Floor:
    """Find the floor of a budget.

    ``ways`` are the stage as plans may hold it, each with the bytes of its weights that have no
    room. Weights that are not on the GPU when a pass starts must cross before it ends, if the pass
    reads them. The weights that a pass reads least are the first that have no room. They are
    embeddings, of which it reads rows, then routed experts. Of these it reads as many as uniform
    routing has, or as caches of the best sizes miss in a profile. ``resident_ps`` are the fastest
    prompt and decode step with everything resident; ``elsewhere_ps`` the same of a pipeline's other
    stages, which come on top. Backends of ``beside`` read in decode as well as the link. Passes of
    a ``mix`` check drafts: the decode step is then their mean, and the floor's that of a token.
    """
    rate = max(backend.rate(machine).value for backend in BACKENDS.values() if backend.is_usual)

    def least_read(tokens: int, reuse: BatchReuse | None) -> int:
        num_tokens = workload.batch * tokens
        return min(_least_read(stage, missing, num_tokens, reuse) for stage, missing in ways)

    stage, batch = ways[0][0], workload.batch
    prefill_bytes = least_read(workload.prompt_tokens, None)
    read = (share * least_read(n, stage.reuse(batch, n)) for n, share in mix.shares)
    decode_bytes = round(sum(read))
    others_s = [to_seconds(each) for each in elsewhere_ps]
    prefill_s = max(to_seconds(resident_ps[0]), prefill_bytes / rate) + others_s[0]
    in_all = rate + sum(backend.rate(machine).value for backend in beside)
    decode_s = max(to_seconds(resident_ps[1]), decode_bytes / in_all) + others_s[1]
    decode_s /= mix.tokens
    return Floor(
        missing_bytes=min(missing for _, missing in ways),
        decode_link_bytes=round(decode_bytes / mix.tokens),
        prefill_link_bytes=prefill_bytes,
        decode_s=decode_s,
        prefill_s=prefill_s,
        objective_s=prefill_s + workload.num_steps * decode_s,
    )


def _least_read(stage: Stage, missing_bytes: int, num_tokens: int, reuse: BatchReuse | None) -> int:
    """Return bytes of the missing ones that a pass reads, if those read least are missing."""
    read, left = 0.0, missing_bytes
    tables, experts = (each for each in stage.tables if each.nbytes), stage.experts
    for share, table in sorted((each.share(num_tokens), each.nbytes) for each in tables):
        rows = min(left, table)
        read += rows * share
        left -= rows
    if experts is not None:
        in_all = sum(layer.expert_bytes for layer in stage.layers)
        routed = min(left, in_all)
        if reuse is None:
            read += routed * experts.touched(num_tokens) / experts.num_experts
        elif in_all:
            num_experts = experts.num_experts * len(reuse.layers)
            kept = num_experts * (1 - routed / in_all)
            read += in_all / num_experts * reuse.least_missed(kept)
        left -= routed
    return int(read) + left
