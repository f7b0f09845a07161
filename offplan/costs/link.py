"""What crosses the link when kernels read offloaded weights in place."""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

from offplan.checkpoint.model import Experts
from offplan.costs.work import PassShape
from offplan.placement import Phase, Placement, SlabEntry
from offplan.plan import Backend
from offplan.schedule import kept_after_prefill

REREADS = ((128, 1.0), (256, 2.0), (512, 2.0), (1024, 5.0), (4096, 17.0))
"""Rows of a matrix product, and how often each byte of a weight read in place then crosses.

Source: cuBLAS bf16 products on an H200 (51, 25.6, 25.6, 10.1 and 3.0 GB/s effective): tiles re-read
the weight. Between and beyond the points the logarithms are interpolated linearly; at 8192 rows
that gives 31, where vLLM's prefill of Qwen3-8B with 7 GiB read in place showed 37.
"""


def reread_factor(num_rows: float) -> float:
    """How often each byte of a weight read in place crosses in a product of ``num_rows`` rows."""
    first, _ = REREADS[0]
    if num_rows <= first:
        return 1.0
    upper = min(bisect_left([rows for rows, _ in REREADS], num_rows), len(REREADS) - 1)
    (rows_a, factor_a), (rows_b, factor_b) = REREADS[upper - 1], REREADS[upper]
    share = log(num_rows / rows_a) / log(rows_b / rows_a)
    return factor_a * exp(share * log(factor_b / factor_a))


def uva_bytes(num_bytes: int, is_expert: bool, experts: Experts | None, num_tokens: int) -> int:
    """Bytes that cross when a pass of so many tokens reads ``num_bytes`` of one layer in place.

    Weights cross whole; of routed experts those that the tokens are sent to (uniform routing), each
    for its share of the tokens.
    """
    rows: float = num_tokens
    if not is_expert or experts is None:
        return round(num_bytes * reread_factor(rows))
    rows *= experts.num_experts_per_token / experts.num_experts
    share = experts.touched(num_tokens) / experts.num_experts
    return round(num_bytes * share * reread_factor(rows))


def embedding_bytes(placement: Placement, shapes: Sequence[PassShape]) -> int:
    """Bytes that a pass of these chunks reads of an input embedding on the host: a row a token."""
    table = placement.host_embedding
    if table is None:
        return 0
    return sum(shape.num_tokens for shape in shapes) * (table.nbytes // table.shape[0])


def uva_bytes_by_layer(
    placement: Placement, experts: Experts | None, num_layers: int, shapes: Sequence[PassShape]
) -> tuple[int, ...]:
    """Bytes that each layer reads in place in a pass of these chunks, re-reads included.

    The kernels of each chunk read for themselves. Decode reads what prefill left in the ring from
    there.
    """
    phase = shapes[0].phase
    kept = kept_after_prefill(placement) if phase is Phase.DECODE else {}

    def crossing(entries: Sequence[SlabEntry], is_expert: bool) -> int:
        num_bytes = sum(entry.unit.nbytes for entry in entries if entry.unit.is_expert == is_expert)
        return sum(uva_bytes(num_bytes, is_expert, experts, shape.num_tokens) for shape in shapes)

    by_layer = [0] * num_layers
    for slab in placement.slabs:
        in_place = [
            entry
            for entry in slab.entries
            if entry.backend(phase) is Backend.UVA
            and not (slab.layer in kept and entry.prefill is Backend.PREFETCH)
        ]
        by_layer[slab.layer] = crossing(in_place, False) + crossing(in_place, True)
    return tuple(by_layer)
