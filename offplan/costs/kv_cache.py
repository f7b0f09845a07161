"""Costs of a KV cache that is kept as codes, beyond those of one as the model computes it."""

from offplan.costs.work import LayerWork, PassShape
from offplan.placement import Phase


def cached_bytes(work: LayerWork, shape: PassShape, *, in_place: bool) -> int:
    """Bytes to and from GPU memory that codes add to a pass; fewer than none where they save some.

    A step reads codes ``in_place`` of values, if a kernel does. For each chunk of a prompt a kernel
    reads the codes of what the chunk sees, and writes the values that attention reads. Engines read
    codes in both phases. Source: ``runtime.model.codes_kernel``.
    """
    size = shape.batch, shape.context
    codes, values = work.kv_cache.nbytes(*size), work.kv_cache.as_computed.nbytes(*size)
    if not work.expands_cache or (in_place and shape.phase is Phase.DECODE):
        return codes - values
    return codes + values
