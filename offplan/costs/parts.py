"""Costs of prompts in which layers stream their routed experts in parts."""

from collections.abc import Iterator
from operator import sub
from typing import NamedTuple

from offplan.checkpoint.parameter import Role, role_of
from offplan.costs.activations import activation_bytes, pair_bytes, phase_bytes, waiting_bytes
from offplan.costs.pass_compute import PassCompute
from offplan.costs.term import Input
from offplan.costs.timeline import PassTimes, PieceTimes, to_ps, to_seconds
from offplan.costs.work import prefill_shapes
from offplan.held.stage import Stage
from offplan.kernel_sizes import is_captured, parted_width
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.plan import Workload

PART_LAUNCH_S = 0.28e-3
"""Seconds that the host takes to launch what multiplies a batch of pairs: at most a chunk's.

Kernels before and after are captured. Source: DeepSeek-V2-Lite in 4 GiB beside an H100. A prompt of
8 chunks that met 8 parts took 83 to 95 ms for 306 batches of 208 parts.
"""
REST_OF_BATCHES = 0.5
"""Batches of a part beyond the chunks that it multiplies on average: its last one is not full.

Source: the same prompt, and eight layers of Mixtral-8x22B in 16 chunks: 1.47 batches a part, 2.48.
"""
CHUNK_LAUNCH_S = 1.5e-3
"""Seconds that the host takes to launch a chunk of a layer without its experts, uncaptured.

Source: eight layers of Mixtral-8x22B beside an H200, a prompt of 32 chunks: 0.94 s, where 0.65 were
predicted without it. DeepSeek-V2-Lite in 4 GiB took 0.84 ms of each of 416 chunks of a layer.
"""
PART_COPIES = 3
"""Hidden states of each token that a chunk keeps at a layer's experts, beside those that wait in
every layer. They are the residual behind attention, the normed one, and the normed one beside other
chunks'. Shared experts may add theirs.

Source: transformers' decoder layers, read; not yet measured.
"""
CHOICE_BYTES = 28
"""Bytes of each choice of a token: expert, sorted expert and order in 8 each, a weight in 4.

Source: ``runtime.parts.experts.Meeting``.
"""
SCORE_BYTES = 8
"""Bytes of a token's score of each expert, as the router gives it and in float32.

Source: transformers' routers, read.
"""

PAIRS_MARGIN = 1.1
"""Memory counted for the pairs of tokens and experts that are multiplied at a time, as a multiple
of what lives of them.

Source: a margin. torch's snapshots have no more than what lives: 192 MiB for DeepSeek-V2-Lite, 328
for Mixtral-8x22B. With it both took 0.99 and 1.00 of their memory on an H100.
"""


def piece_times(placement: Placement, priced: PassCompute) -> dict[int, PieceTimes]:
    """Find what each part of a layer's experts takes in a prompt, by layer index.

    Each has as many experts, and each group as many chunks: they take as much of what all do.
    """
    if priced.shapes[0].phase is Phase.DECODE:
        return {}
    num_chunks = len(priced.shapes)
    return {
        layer: divide_ps(priced, layer, len(parts), placement.num_groups(layer, num_chunks))
        for layer, parts in placement.pieces.items()
    }


def divide_ps(priced: PassCompute, layer: int, num_parts: int, num_groups: int = 1) -> PieceTimes:
    """Divide the picoseconds of a prompt's layer between its routed experts and the rest.

    Each part and group takes PART_LAUNCH_S a batch: the host is not ahead of the device, since it
    waits for the chunks' choices. Nor is it with the rest, which takes CHUNK_LAUNCH_S a chunk at
    least where the prompt is not captured.
    """
    num_chunks, routed_ps = len(priced.shapes), priced.routed_ps[layer]
    num_parted, at_once = num_groups * num_parts, -(-num_chunks // num_groups)
    launching_ps = to_ps(max(1.0, at_once / num_parts + REST_OF_BATCHES) * PART_LAUNCH_S)
    late_ps = 0
    if not is_captured(num_chunks, priced.shapes[0].num_tokens):
        rest_ps = priced.layer_ps[layer] - routed_ps
        late_ps = max(0, to_ps(num_chunks * CHUNK_LAUNCH_S) - rest_ps)
    return PieceTimes(
        moved_ps=routed_ps - late_ps,
        piece_ps=-(-routed_ps // num_parted) + launching_ps,
        launching_ps=num_parted * launching_ps + late_ps,
        num_groups=num_groups,
    )


def name_bytes(
    placement: Placement, stage: Stage, workload: Workload, prefill_chunk: int
) -> dict[str, int]:
    """Name the bytes that chunks take at the experts of layers in parts."""
    if not placement.pieces:
        return {}
    memory = find_parts_memory(stage, workload, prefill_chunk)
    of_groups = [memory.of_group(placement.chunks_at_once.get(n)) for n in placement.pieces]
    return {"chunks at experts in parts": max(of_groups)}


def list_waits(times: PassTimes, stage: Stage, machine: MachineProfile) -> Iterator[Input]:
    """Yield what launching parts takes, if any stream."""
    if times.pieces:
        formula = "PART_LAUNCH_S x pieces of each part, CHUNK_LAUNCH_S x chunks if uncaptured"
        launching_s = to_seconds(sum(each.launching_ps for each in times.pieces.values()))
        yield Input("launching parts", launching_s, "s", formula)


class PartsMemory(NamedTuple):
    """GPU memory that a prompt takes at a layer's experts in parts, in bytes.

    Source: on an H100 six prompts of three models met 8 parts in 2 to 16 chunks. They took 0.968 to
    0.997 of their plans' memory. With a context of twice the prompt's tokens another took 0.942,
    and prompts of its context 0.954 and 1.01 (``benchmarks/results/parts-memory-h100.json`` and
    ``parts-h100.json``).
    """

    token_bytes: int
    """Bytes of each token of a group, from where it comes to the experts until it goes on."""
    product_bytes: int
    """Bytes of each token of a group besides, while the group meets the parts."""
    block_bytes: int
    """Bytes of a chunk in attention or MLP, which is over by then. Half of the products, at most,
    lie in its memory, and none of several groups' products."""
    routed_bytes: int
    """Part of ``activation_bytes`` that is not taken if no layer has its experts whole."""
    pair_bytes: int
    """Bytes of the pairs that are multiplied at a time: nothing of it is captured."""
    longer_bytes: int
    """Bytes that wait in every layer for a prompt as long as the context, beyond planned ones'."""
    workload: Workload
    prefill_chunk: int

    def of_group(self, chunks_at_once: int | None) -> int:
        """Count the bytes of a group of so many chunks, None for all, beside all other passes.

        They are tokens of the planned prompts, or of one as long as the context: it may come, too.
        """
        most = max(self.workload.batch * self.workload.prompt_tokens, self.workload.context)
        tokens = most
        if chunks_at_once is not None:
            of_group = self.workload.batch * chunks_at_once * self.prefill_chunk
            tokens = min(most, of_group)
        products = tokens * self.product_bytes
        shared = min(self.block_bytes, products // 2) if tokens == most else 0
        waiting = tokens * self.token_bytes + self.longer_bytes
        return waiting + products - shared + self.pair_bytes


def find_parts_memory(stage: Stage, workload: Workload, prefill_chunk: int) -> PartsMemory:
    """Find what a prompt in chunks takes at the experts of layers in parts.

    A token has PART_COPIES of its hidden state, that of shared experts, its choices and its scores;
    then the product of each of its choices.
    """
    assert stage.experts is not None
    num_chosen = stage.experts.num_experts_per_token
    has_shared = any(role_of(parameter) is Role.SHARED_EXPERTS for parameter in stage.parameters)
    state_bytes = stage.architecture.hidden_size * stage.element_bytes
    kept = (PART_COPIES * stage.architecture.num_streams + has_shared) * state_bytes
    chunk = prefill_shapes(workload, prefill_chunk)[0]
    longest = workload.model_copy(update={"batch": 1, "prompt_tokens": workload.context})
    waits = [
        waiting_bytes(stage, of, prefill_shapes(of, prefill_chunk)[0]) for of in (workload, longest)
    ]
    prompt, _ = phase_bytes(stage, workload, prefill_chunk, in_pieces=True)
    live = max(pair_bytes(stage, layer, chunk, parted_width) for layer in stage.layers)
    sizes = (activation_bytes(stage, workload, prefill_chunk, in_pieces=of) for of in (False, True))
    return PartsMemory(
        token_bytes=kept + CHOICE_BYTES * num_chosen + SCORE_BYTES * stage.experts.num_in_all,
        product_bytes=num_chosen * state_bytes,
        block_bytes=prompt - waits[0],
        routed_bytes=sub(*sizes),
        pair_bytes=round(PAIRS_MARGIN * live),
        longer_bytes=max(0, waits[1] - waits[0]),
        workload=workload,
        prefill_chunk=prefill_chunk,
    )
