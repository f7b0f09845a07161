"""The bytes that cross the link when kernels read offloaded weights in place."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import erfc, exp, log, prod, sqrt

from offplan.checkpoint.model import Experts
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.work import PassShape, gathers_codes
from offplan.held.unit import Unit
from offplan.kernel_sizes import IN_PLACE_ROWS
from offplan.machine.curve import Reread
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.plan import Backend
from offplan.schedule import kept_after_prefill

REREADS = tuple(
    Reread(rows=rows, factor=factor)
    for rows, factor in ((128, 1.0), (256, 2.0), (512, 2.0), (1024, 5.0), (4096, 17.0))
)
"""Re-reads taken for a machine whose profile has no ``uva_rereads``: those of an H200.

Source: cuBLAS bf16 products on an H200 (51, 25.6, 25.6, 10.1 and 3.0 GB/s effective): tiles re-read
the weight.
"""

TILE_ROWS = 128
"""Rows of a product that read a weight together, at least.

Source: cuBLAS on an H200 read a weight of 128 MiB once for 256 rows and twice for 512; with
``o_proj`` (32 MiB) of ten layers of Qwen3-8B in place, a prompt of 512 took 15 ms longer than at
twice, which four times would explain; with the MLP of one layer there too, three would.
"""

EXPERT_ROWS = 180
"""Rows of a grouped product that read an expert's weight together.

Source: prompts of DeepSeek-V2-Lite with experts in place on an H200: 192 rows an expert read it
1.1 times, 384 rows 1.95 times.
"""

LINE_BYTES = 128
"""Bytes that kernels ask of host memory at a time, at most."""

UNALIGNED_ROWS = 1.3
"""Time of reading codes in place whose rows begin amid a line, as a multiple of that of others.

Source: decode steps of gpt-oss on an H200, whose rows of MXFP4 have 1,440 bytes, in four plans:
1.25, 1.30, 1.32 and 1.33.
"""

UVA_SLOWDOWN = 1.16
"""Slowdown taken for a machine whose profile has no ``uva_beside_copies``: that of an H200.

Source: matrix-vector products of 32 MiB each while copies are queued; other kernels that read in
place were 1.09 to 1.21 times slower than alone.
"""


def uva_slowdown(machine: MachineProfile) -> float:
    """Time of reading in place in a pass that copies too, as a multiple of that without copies."""
    beside = machine.uva_beside_copies
    return UVA_SLOWDOWN if beside is None else max(1.0, machine.uva.value / beside.value)


def reread_factor(machine: MachineProfile, num_rows: float) -> float:
    """How often each byte of a weight read in place may cross in a product of ``num_rows`` rows.

    Between and beyond the measured points the logarithms are interpolated linearly, beyond them
    with a slope of 1 at most. They are those of one weight; another shape gets other tiles, so no
    more is relied on than that tiles of TILE_ROWS read the weight once each.
    """
    points = REREADS if machine.uva_rereads is None else machine.uva_rereads.value
    return max(_measured_factor(points, num_rows), num_rows / TILE_ROWS)


def _measured_factor(points: Sequence[Reread], num_rows: float) -> float:
    if num_rows <= points[0].rows:
        return points[0].factor
    upper = min(bisect_left(points, num_rows, key=lambda point: point.rows), len(points) - 1)
    a, b = points[upper - 1], points[upper]
    reach, rise = log(b.rows / a.rows), log(b.factor / a.factor)
    if num_rows > b.rows:
        # tiles read the weight once each: their number grows with the rows, not faster
        return b.factor * exp(log(num_rows / b.rows) * min(1.0, rise / reach))
    return a.factor * exp(log(num_rows / a.rows) / reach * rise)


def uva_bytes(
    machine: MachineProfile, units: Iterable[Unit], experts: Experts | None, num_tokens: int
) -> int:
    """Bytes that cross when a pass of so many tokens reads units of one layer in place.

    Weights cross whole; of routed experts those that the tokens are sent to (uniform routing), each
    for its share of the tokens. How often is measured for just such products, or what other ones
    did.
    """
    crossing = 0.0
    for unit in units:
        is_coded = not unit.parameters[0].form.is_raw
        # codes are read once, whether they are multiplied or expanded
        factor = 1.0 if is_coded else machine.find_in_place_read(unit.shape, num_tokens)
        share = 1.0
        if unit.is_expert and experts is not None:
            share = experts.touched(num_tokens) / experts.num_experts
            rows = num_tokens * experts.num_experts_per_token / experts.num_in_all
            if is_coded or factor is None:
                factor = coded_reads(rows) if is_coded else max(1.0, rows / EXPERT_ROWS)
        is_gathered = unit.is_expert and gathers_codes(experts, num_tokens)
        if is_coded and not is_gathered and not _has_aligned_rows(unit):
            factor = UNALIGNED_ROWS * (factor or 1.0)
        crossing += unit.nbytes * share * (factor or reread_factor(machine, num_tokens))
    return round(crossing)


def coded_reads(mean_rows: float) -> float:
    """How often the codes of an expert are read whose rows are ``mean_rows`` on average.

    Once for each IN_PLACE_ROWS of them begun. Rows of an expert are as many as chance has it: of a
    normal distribution as wide as Poisson's.
    """
    reads, rows, deviation = 1.0, IN_PLACE_ROWS, sqrt(max(mean_rows, 1.0))
    while (beyond := erfc((rows - mean_rows) / (sqrt(2) * deviation)) / 2) > 1e-3:
        reads += beyond
        rows += IN_PLACE_ROWS
    return reads


def _has_aligned_rows(unit: Unit) -> bool:
    """Whether every row of a weight's codes begins with a line."""
    weight = unit.parameters[0]
    return weight.tensors[0].nbytes // max(1, prod(weight.shape[:-1])) % LINE_BYTES == 0


def embedding_bytes(table: TensorInfo | None, shapes: Sequence[PassShape]) -> int:
    """Bytes that a pass of these chunks reads of an input embedding on the host, if it is there.

    A row a token, and that of each sequence's last one again, for the head of a prompt in chunks.
    """
    if table is None or not table.nbytes:
        return 0
    again = shapes[0].batch if shapes[0].is_part else 0
    num_rows = sum(shape.num_tokens for shape in shapes) + again
    return num_rows * (table.nbytes // table.shape[0])


def uva_bytes_by_layer(
    placement: Placement,
    machine: MachineProfile,
    experts: Experts | None,
    num_layers: int,
    shapes: Sequence[PassShape],
) -> tuple[int, ...]:
    """Bytes that each layer reads in place in a pass of these chunks, re-reads included.

    The kernels of each chunk read for themselves. Decode reads what prefill left in the ring from
    there.
    """
    phase = shapes[0].phase
    kept = kept_after_prefill(placement) if phase is Phase.DECODE else {}

    # nearly all chunks of a prompt are of one size
    chunks = Counter(shape.num_tokens for shape in shapes)
    by_layer = [0] * num_layers
    for slab in placement.slabs:
        in_place = [
            entry.unit
            for entry in slab.entries
            if entry.backend(phase) is Backend.UVA
            and not (slab.layer in kept and entry.prefill is Backend.PREFETCH)
        ]
        by_layer[slab.layer] = sum(
            count * uva_bytes(machine, in_place, experts, num_tokens)
            for num_tokens, count in chunks.items()
        )
    return tuple(by_layer)
