"""The bytes that cross the link when layers read offloaded weights at use."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erfc, exp, log, prod, sqrt

from offplan.checkpoint.model import Experts
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tables import Table
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape, gathers_codes, groups_codes
from offplan.held.unit import Unit
from offplan.kernel_sizes import IN_PLACE_ROWS, LINE_BYTES, rows_in_place
from offplan.machine.curve import Reread
from offplan.machine.profile import MachineProfile
from offplan.placement import Span
from offplan.routing.profile import BatchReuse

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

Source: cuBLAS on an H200 read a weight of 128 MiB once for 256 rows and twice for 512. With
``o_proj`` (32 MiB) of ten layers of Qwen3-8B in place, a prompt of 512 took 15 ms longer than at
twice. Four times would explain that; with the MLP of one layer there too, three would.
"""

UNALIGNED_ROWS = 1.3
"""Time of reading codes in place whose rows begin amid a line, as a multiple of that of others.

Source: decode steps of gpt-oss on an H200, whose rows of MXFP4 have 1,440 bytes, in four plans:
1.25, 1.30, 1.32 and 1.33. By tiles of 8 rows three more took 1.27 to 1.29.
"""

UVA_SLOWDOWN = 1.16
"""Slowdown taken for a machine whose profile has no ``uva_beside_copies``: that of an H200.

Source: matrix-vector products of 32 MiB each while copies are queued; other kernels that read in
place were 1.09 to 1.21 times slower than alone.
"""


def copy_ps(machine: MachineProfile, span: Span) -> int:
    """Picoseconds of copying a span: a DMA for each of its runs."""
    again = (len(span.runs) - 1) * machine.copy_latency.value
    return to_ps(machine.copy_seconds(span.nbytes) + again)


def uva_slowdown(machine: MachineProfile) -> float:
    """Time of reading in place in a pass that copies too, as a multiple of that without copies."""
    beside = machine.uva_beside_copies
    return UVA_SLOWDOWN if beside is None else max(1.0, machine.uva.value / beside.value)


def reread_factor(machine: MachineProfile, num_rows: float) -> float:
    """How often each byte of a weight read in place may cross in a product of ``num_rows`` rows.

    Between and beyond the measured points the logarithms are interpolated linearly, beyond them
    with a slope of 1 at most. They are those of one weight, and another shape gets other tiles. No
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


@dataclass(frozen=True)
class UnitUse:
    """One unit in a pass of so many tokens: the facts by which a backend prices it."""

    unit: Unit
    num_tokens: int
    experts: Experts | None
    machine: MachineProfile
    reuse: BatchReuse | None = None
    """How the tokens of a decode step choose experts; None where they choose all alike."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unit."""
        return self.unit.nbytes

    @property
    def touched(self) -> float:
        """Part of the unit that the tokens are sent to, by a profile or uniform routing."""
        if not self.unit.is_expert or self.experts is None:
            return 1.0
        chosen = self.reuse.touched if self.reuse else self.experts.touched(self.num_tokens)
        return chosen / self.experts.num_experts

    @property
    def num_reads(self) -> float:
        """How often each byte is read: measured for just such products, or as other ones did.

        Routed experts are read by uniform routing, each for its share of the tokens.
        """
        unit, experts, machine = self.unit, self.experts, self.machine
        is_coded = not unit.parameters[0].form.is_raw
        # codes are read once, whether they are multiplied or expanded
        factor = 1.0 if is_coded else machine.find_in_place_read(unit.shape, self.num_tokens)
        if unit.is_expert and experts is not None and (is_coded or factor is None):
            rows = self.num_tokens * experts.num_experts_per_token / experts.num_in_all
            factor = expert_reads(rows, IN_PLACE_ROWS if is_coded else rows_in_place(rows, 1))
            kinds = [parameter.form.kind.value for parameter in unit.parameters]
            if is_coded and groups_codes(experts, self.num_tokens, kinds):
                factor = 1.0
        is_gathered = unit.is_expert and gathers_codes(experts, self.num_tokens)
        if is_coded and not is_gathered and not has_aligned_rows(unit.parameters[0]):
            factor = UNALIGNED_ROWS * (factor or 1.0)
        return factor or reread_factor(machine, self.num_tokens)


def expert_reads(mean_rows: float, together: int) -> float:
    """How often an expert is read whose rows are ``mean_rows`` on average.

    Once for each ``together`` of them begun. Rows of an expert are as many as chance has it: of a
    normal distribution as wide as Poisson's.
    """
    reads, rows, deviation = 1.0, together, sqrt(max(mean_rows, 1.0))
    while (beyond := erfc((rows - mean_rows) / (sqrt(2) * deviation)) / 2) > 1e-3:
        reads += beyond
        rows += together
    return reads


def has_aligned_rows(weight: Parameter) -> bool:
    """Return True if every row of a weight's codes begins with a line."""
    return weight.tensors[0].nbytes // max(1, prod(weight.shape[:-1])) % LINE_BYTES == 0


def rows_bytes(tables: Iterable[Table], shapes: Sequence[PassShape]) -> int:
    """Bytes that a pass of these chunks reads of tables on the host.

    The rows of each token, and those of each sequence's last one again, for the head of a prompt in
    chunks.
    """
    again = shapes[0].batch if shapes[0].is_part else 0
    num_tokens = sum(shape.num_tokens for shape in shapes) + again
    return num_tokens * sum(table.token_bytes for table in tables)
