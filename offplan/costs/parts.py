"""What prompts take besides where layers stream their routed experts in parts."""

from offplan.costs.compute import LAUNCH_S, PassCompute
from offplan.costs.timeline import PartTimes, to_ps
from offplan.held.stage import Stage
from offplan.placement import Phase, Placement
from offplan.plan import Workload

PART_OPERATORS = 24
"""Operators that a chunk launches for each part of a layer's experts, which run uncompiled.

Source: ``runtime.model.parts.Arrived.add`` and transformers' ``grouped_mm``, read.
"""
PART_COPIES = 4
"""Hidden states that a chunk keeps of each token at a layer's experts, beside those that wait in
every layer: what went into attention, the residual behind it, the normed one, a copy of it.

Source: transformers' decoder layers, read; not yet measured.
"""
CHOICE_BYTES = 28
"""Bytes of each choice of a token: expert, sorted expert and order in 8 each, a weight in 4.

Source: ``runtime.model.parts.Arrived``.
"""
SCORE_BYTES = 8
"""Bytes of a token's score of each expert, as the router gives it and in float32.

Source: transformers' routers, read.
"""


def part_times(placement: Placement, priced: PassCompute) -> dict[int, PartTimes]:
    """Find what each part of a layer's experts takes in a prompt, by layer index.

    Each has as many experts, and so takes as much of what all of them do.
    """
    if priced.shapes[0].phase is Phase.DECODE:
        return {}
    launching = launching_ps(len(priced.shapes))
    return {
        layer: PartTimes(routed, -(-routed // len(parts)) + launching, len(parts) * launching)
        for layer, parts in placement.parts.items()
        for routed in (priced.routed_ps[layer],)
    }


def launching_ps(num_chunks: int) -> int:
    """Picoseconds that the chunks of a prompt take to launch a part: PART_OPERATORS each."""
    return to_ps(num_chunks * PART_OPERATORS * LAUNCH_S)


def parts_bytes(stage: Stage, workload: Workload) -> int:
    """Bytes that all chunks of a prompt keep at the experts of a layer in parts.

    For each token PART_COPIES of its hidden state, the product of each of its choices, the choices
    and the scores.
    """
    if stage.experts is None:
        return 0
    num_chosen = stage.experts.num_experts_per_token
    states = PART_COPIES * stage.architecture.num_streams + num_chosen
    each = states * stage.architecture.hidden_size * stage.element_bytes
    each += CHOICE_BYTES * num_chosen + SCORE_BYTES * stage.experts.num_in_all
    return workload.batch * workload.prompt_tokens * each
