"""Costs of a KV cache that is kept as codes, beyond those of one as the model computes it."""

from offplan.costs.work import LayerWork, PassShape
from offplan.placement import Phase

VALUE_PASSES = 9
"""Times that a prompt moves the values of one layer's codes before attention reads them: written,
then read and written again four times, as bits are moved and values scaled.

Source: ``runtime.model.cache_codes.decode_to``.
"""


def cached_bytes(work: LayerWork, shape: PassShape, *, in_place: bool) -> int:
    """Bytes to and from GPU memory that codes add to a pass; fewer than none where they save some.

    A step reads codes ``in_place`` of values, if a kernel does. A prompt has the values of what it
    sees made chunk by chunk. Engines read codes in both phases.
    """
    size = shape.batch, shape.context
    codes, values = work.kv_cache.nbytes(*size), work.kv_cache.as_computed.nbytes(*size)
    if not work.expands_cache or (in_place and shape.phase is Phase.DECODE):
        return codes - values
    return codes + VALUE_PASSES * values
