"""A table of what a rank of each stage takes."""

from collections.abc import Sequence

from rich.table import Table

from offplan.library.shares import StageShare
from offplan.report.table import make_table
from offplan.units import format_bytes


def render_shares(shares: Sequence[StageShare]) -> Table:
    """Show what each rank takes by a plan, a row for each stage."""
    headings = ("stage", "layers", "weights", "ring", "KV cache", "GPU", "host")
    table = make_table("Each rank", *headings)
    for each in shares:
        memory, host_bytes = each.gpu_memory, each.host_memory_bytes
        assert memory is not None, "a plan is shown"
        assert host_bytes is not None, "a plan is shown"
        terms = each.loaded_bytes, memory.ring_bytes, memory.kv_cache_bytes, memory.total_bytes
        sizes = map(format_bytes, (*terms, host_bytes))
        table.add_row(str(each.stage), str(each.num_layers), *sizes)
    return table
