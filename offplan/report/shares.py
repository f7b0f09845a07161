"""The share of one GPU, by a plan of several."""

from collections.abc import Sequence

from rich.table import Table

from offplan.held.stage import Stage
from offplan.library.shares import StageShare
from offplan.machine.profile import MachineProfile
from offplan.plan import Plan
from offplan.report.table import make_table
from offplan.units import format_bytes


def describe_shares(plan: Plan, stages: Sequence[Stage], machine: MachineProfile) -> list[str]:
    """Say what one of several GPUs holds, and what is not counted; nothing for one GPU."""
    goal = plan.goal
    if goal.num_gpus == 1:
        return []
    weights = " and ".join(format_bytes(stage.loaded_bytes) for stage in stages)
    layers = " and ".join(str(len(stage.layers)) for stage in stages)
    of_stage = f" in {len(stages)} stages of {layers} layers" if len(stages) > 1 else ""
    told = [
        f"Each of {goal.gpus} takes this GPU memory; its share of the weights is "
        f"{weights}{of_stage}. The host memory is the sum over all GPUs.",
        "The prediction does not count what GPUs send each other, in time or in buffers.",
    ]
    if goal.num_copying > max(machine.concurrent_rates, default=1):
        told.append(
            "The prediction assumes that each GPU has the whole link while "
            f"{goal.num_copying} copy; offplan measure on a host with as many GPUs measures what "
            "it has."
        )
    if stages[0].experts is not None and stages[0].experts.groups > 1:
        told.append(
            "It assumes that each expert computes as many tokens as any other; where one "
            "computes more, all GPUs wait for its GPU."
        )
    return told


def render_shares(shares: Sequence[StageShare]) -> Table:
    """Show what a GPU of each stage takes by a plan, a row for each stage."""
    headings = ("stage", "layers", "weights", "ring", "KV cache", "GPU", "host")
    table = make_table("Each GPU", *headings)
    for each in shares:
        memory, host_bytes = each.gpu_memory, each.host_memory_bytes
        assert memory is not None, "a plan is shown"
        assert host_bytes is not None, "a plan is shown"
        terms = each.loaded_bytes, memory.ring_bytes, memory.kv_cache_bytes, memory.total_bytes
        sizes = map(format_bytes, (*terms, host_bytes))
        table.add_row(str(each.stage), str(each.num_layers), *sizes)
    return table
