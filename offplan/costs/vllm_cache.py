"""The KV cache that vLLM needs for a workload, in blocks that layers share.

Source: vLLM 0.33.0, ``v1/core/kv_cache_planning`` (``_get_kv_cache_groups_uniform_page_size``,
``_project_kv_cache_groups_to_worker``, ``_max_memory_usage_bytes_from_groups``),
``v1/kv_cache_interface`` and ``platforms/interface``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from offplan.costs.work import step_tokens
from offplan.held.stage import Stage
from offplan.plan import Workload

CacheKind = tuple[int | None, bool]
"""A layer's window, if any, and whether it has a state."""

BLOCK_TOKENS = (16, 32, 64, 128)
"""Tokens in a block of the KV cache, or parts of one that holds a state: backends differ.

Source: ``get_supported_kernel_block_sizes`` of FlashAttention, FlashInfer, FlashMLA, CUTLASS MLA.
"""
MORE_STATES = 2
"""States that vLLM wants room for beside that of each sequence, since it caches those of prefixes.

Source: ``MambaSpec.max_memory_usage_bytes``.
"""
IN_FLIGHT = 2
"""Steps that are scheduled at once, of each stage. Source: ``VllmConfig.max_in_flight_tokens``."""


def cache_bytes(stage: Stage, workload: Workload, prefill_chunk: int) -> int:
    """Bytes that a GPU needs for a batch of whole contexts.

    They are those of the caches in whole blocks, or of as many blocks as vLLM divides them into,
    whichever of its sizes blocks have. It keeps one empty, and does not start where a whole context
    has no room.
    """
    caches = [layer.kv_cache for layer in stage.layers]
    tokens = 1 + workload.batch * -(-workload.context // BLOCK_TOKENS[-1])
    tokens *= BLOCK_TOKENS[-1]
    planned = tokens * sum(each.bytes_per_token for each in caches)
    planned += workload.batch * sum(each.state_bytes for each in caches)
    kinds = _list_kinds(stage)
    if kinds.keys() <= {(None, False)}:
        return planned
    sizes = (_blocks_bytes(stage, kinds, workload, prefill_chunk, n) for n in BLOCK_TOKENS)
    return max(planned, *sizes)


def _list_kinds(stage: Stage) -> dict[CacheKind, list[bool]]:
    """List the layers of each kind in the whole model, and whether the stage has them."""
    here = {layer.prefix for layer in stage.layers}
    kinds: defaultdict[CacheKind, list[bool]] = defaultdict(list)
    for layer in stage.model.layers:
        cache = layer.kv_cache
        if cache.bytes_per_token or cache.state_bytes:
            kinds[cache.window, cache.state_bytes > 0].append(layer.prefix in here)
    return kinds


def _blocks_bytes(
    stage: Stage,
    kinds: Mapping[CacheKind, Sequence[bool]],
    workload: Workload,
    prefill_chunk: int,
    block_tokens: int,
) -> int:
    """Bytes of the blocks that a batch of whole contexts takes, and of the empty one."""
    batch, context = workload.batch, workload.context
    caches = [layer.kv_cache for layer in stage.layers]
    in_flight = IN_FLIGHT * stage.num_stages * step_tokens(workload, prefill_chunk)
    # a block has so many tokens that it holds a state
    token_bytes = max(each.bytes_per_token for each in caches)
    block_bytes = max(1, *(each.state_bytes for each in caches))
    if token_bytes:
        multiple = block_tokens * token_bytes
        block_bytes = -(-block_bytes // multiple) * multiple
    # layers of a kind are split into groups of one size, each with blocks of its own
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    group_size = most if 2 * most < 3 * fewest else fewest
    num_blocks, widest = 1, 0
    for (window, has_state), layers in kinds.items():
        kept = context if window is None else min(context, window)
        reached = min(context, kept + in_flight)
        of_group = batch * -(-reached * token_bytes // block_bytes)
        if window is not None:
            # all prompts together pass so many tokens, and a window need not begin with a block
            passed = min(batch * (reached - kept), in_flight)
            together = (batch * kept + passed) * token_bytes
            of_group = batch + min(of_group, batch - 1 - (-together // block_bytes))
        if has_state:
            of_group = batch + MORE_STATES
        num_groups = -(-len(layers) // group_size)
        num_blocks += num_groups * of_group
        # of a pipeline the groups are those of all stages, which have unlike parts of them
        widest = max(widest, *(sum(layers[i::num_groups]) for i in range(num_groups)))
    return widest * block_bytes * num_blocks
