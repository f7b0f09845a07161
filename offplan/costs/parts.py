"""What prompts take besides where layers stream their routed experts in parts."""

from offplan.checkpoint.roles import Role, role_of
from offplan.costs.compute import PassCompute
from offplan.costs.timeline import PartTimes, to_ps
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement, Span
from offplan.plan import Workload

PART_LAUNCH_S = 0.66e-3
"""Seconds that the host takes to launch a part of a layer's experts, for a chunk's pairs at a time.

What comes before and after is captured. Source: DeepSeek-V2-Lite in 4 GiB beside an H100, a prompt
of 16 chunks that met 8 parts: 276 ms for 208 parts, in two pieces or more each. The first prompt of
a length is not captured: 0.94 s, where later ones take 0.59.
"""
PART_COPIES = 3
"""Hidden states that a chunk keeps of each token at a layer's experts, beside those that wait in
every layer: the residual behind attention, the normed one, and that one beside other chunks'.
Shared experts may add theirs.

Source: transformers' decoder layers, read; not yet measured.
"""
CHOICE_BYTES = 28
"""Bytes of each choice of a token: expert, sorted expert and order in 8 each, a weight in 4.

Source: ``runtime.model.parts.Meeting``.
"""
SCORE_BYTES = 8
"""Bytes of a token's score of each expert, as the router gives it and in float32.

Source: transformers' routers, read.
"""


def span_seconds(machine: MachineProfile, span: Span) -> float:
    """Seconds of copying a span: a DMA for each of its runs."""
    again = (len(span.runs) - 1) * machine.copy_latency.value
    return machine.copy_seconds(span.nbytes) + again


def part_times(placement: Placement, priced: PassCompute) -> dict[int, PartTimes]:
    """Find what each part of a layer's experts takes in a prompt, by layer index.

    Each has as many experts, and each group as many chunks: they take as much of what all do.
    """
    if priced.shapes[0].phase is Phase.DECODE:
        return {}
    num_chunks = len(priced.shapes)
    return {
        layer: divide_ps(
            priced.routed_ps[layer], len(parts), num_chunks, placement.num_groups(layer, num_chunks)
        )
        for layer, parts in placement.parts.items()
    }


def divide_ps(routed_ps: int, num_parts: int, num_chunks: int, num_groups: int = 1) -> PartTimes:
    """Divide the picoseconds of routed experts.

    Each part and group takes PART_LAUNCH_S for as many pairs as a chunk has: the host is not ahead
    of the device, since it waits for the chunks' choices.
    """
    num_parted, at_once = num_groups * num_parts, -(-num_chunks // num_groups)
    launching_ps = to_ps(-(-at_once // num_parts) * PART_LAUNCH_S)
    part_ps = -(-routed_ps // num_parted) + launching_ps
    return PartTimes(routed_ps, part_ps, num_parted * launching_ps, num_groups)


def parts_bytes(
    token_bytes: int, workload: Workload, prefill_chunk: int, chunks_at_once: int | None
) -> int:
    """Bytes that a group of so many chunks of a prompt, or all, keeps at a layer's experts."""
    tokens = workload.prompt_tokens
    if chunks_at_once is not None:
        tokens = min(tokens, chunks_at_once * prefill_chunk)
    return workload.batch * tokens * token_bytes


def bytes_at_experts(stage: Stage) -> int:
    """Bytes that a token keeps at the experts of a layer in parts.

    They are PART_COPIES of its hidden state, that of shared experts, the product of each of its
    choices, the choices and the scores.
    """
    if stage.experts is None:
        return 0
    num_chosen = stage.experts.num_experts_per_token
    has_shared = any(role_of(parameter) is Role.SHARED_EXPERTS for parameter in stage.parameters)
    states = PART_COPIES * stage.architecture.num_streams + has_shared + num_chosen
    each = states * stage.architecture.hidden_size * stage.element_bytes
    return each + CHOICE_BYTES * num_chosen + SCORE_BYTES * stage.experts.num_in_all
