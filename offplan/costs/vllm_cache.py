"""The KV cache that vLLM needs for a workload, in blocks that layers share.

Source: vLLM 0.33.0, ``v1/core/kv_cache_planning`` (``_get_kv_cache_groups_uniform_page_size``,
``_max_memory_usage_bytes_from_groups``), ``v1/kv_cache_interface`` and ``platforms/interface``.
"""

from collections import Counter
from collections.abc import Sequence

from offplan.checkpoint.model import KVCache, Model
from offplan.costs.work import step_tokens
from offplan.plan import Workload

BLOCK_TOKENS = 128
"""Tokens in a block of the KV cache, at most. Source: ``CutlassMLABackend``."""
MORE_STATES = 2
"""States that vLLM wants room for beside that of each sequence, since it caches those of prefixes.

Source: ``MambaSpec.max_memory_usage_bytes``.
"""
IN_FLIGHT = 2
"""Steps that are scheduled at once, of each stage. Source: ``VllmConfig.max_in_flight_tokens``."""


def is_mixed(model: Model) -> bool:
    """Whether layers keep caches of several kinds, or states: vLLM then has blocks of one size."""
    kinds = _count_kinds([layer.kv_cache for layer in model.layers])
    return len(kinds) > 1 or any(has_state for _, has_state in kinds)


def _count_kinds(caches: Sequence[KVCache]) -> Counter[tuple[int | None, bool]]:
    """Count the layers of each window, and those with a state."""
    kept = (each for each in caches if each.bytes_per_token or each.state_bytes)
    return Counter((each.window, each.state_bytes > 0) for each in kept)


def cache_bytes(model: Model, workload: Workload, prefill_chunk: int) -> int:
    """Bytes that a rank needs for a batch of whole contexts.

    They are those of the caches in whole blocks, or of as many blocks as vLLM divides them into.
    It keeps one empty, and does not start where a whole context has no room.
    """
    batch, context = workload.batch, workload.context
    caches = [layer.kv_cache for layer in model.layers]
    num_blocks = 1 + batch * -(-context // BLOCK_TOKENS)
    planned = num_blocks * BLOCK_TOKENS * sum(each.bytes_per_token for each in caches)
    planned += batch * sum(each.state_bytes for each in caches)
    if not is_mixed(model):
        return planned
    # a block has so many tokens that it holds a state
    token_bytes = max(each.bytes_per_token for each in caches)
    block_bytes = max(each.state_bytes for each in caches)
    if token_bytes:
        multiple = BLOCK_TOKENS * token_bytes
        block_bytes = max(1, -(-block_bytes // multiple)) * multiple
    num_stages = 1 if model.share is None else model.share.ranks.pipeline
    in_flight = IN_FLIGHT * num_stages * step_tokens(workload, prefill_chunk)
    # layers of a kind are split into groups of one size, each with blocks of its own
    kinds = _count_kinds(caches)
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if 2 * most < 3 * fewest else fewest
    num_blocks = 1
    for (window, has_state), num_layers in kinds.items():
        kept = context if window is None else min(context, window)
        of_group = batch * -(-kept * token_bytes // block_bytes)
        if has_state:
            of_group = batch + MORE_STATES
        elif window is not None:  # which need not begin with a block
            passed = min(batch * (context - kept), in_flight)
            of_group += batch - (-passed * token_bytes // block_bytes)
        num_blocks += -(-num_layers // group_size) * of_group
    return max(planned, group_size * block_bytes * num_blocks)
