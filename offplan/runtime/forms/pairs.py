"""Pairs of a token and one of its experts, sorted by the expert."""

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import MAX_PAIRS


@triton.jit
def list_pairs(expert_of_pair, order, starts, expert, num_pairs, num_experts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """List an expert's pairs, in their order, behind those of lower experts.

    Pairs whose expert does not exist are in no list. vLLM has such where it runs made-up tokens.
    """
    pair = tl.arange(0, BLOCK)
    chosen = tl.load(expert_of_pair + pair, mask=pair < num_pairs, other=1 << 30)
    chosen = tl.where(chosen < 0, 1 << 30, chosen)
    first = tl.sum((chosen < expert).to(tl.int32), 0)
    mine = chosen == expert
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + first + place, pair, mask=mine)
    tl.store(starts + expert, first)
    if expert == num_experts - 1:
        tl.store(starts + expert + 1, first + tl.sum(mine.to(tl.int32), 0))


@triton.jit
def _sort_pairs(expert_of_pair, order, starts, num_pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program an expert lists its pairs."""
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    list_pairs(expert_of_pair, order, starts, expert, num_pairs, num_experts, BLOCK)


Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The expert of each pair, the pairs by expert, and where each expert's begin among them."""


def sort_pairs(expert_of_pair: torch.Tensor, num_experts: int) -> Pairs:
    """Sort pairs, [pairs], by their expert: int32, [pairs], [experts + 1]."""
    num_pairs = expert_of_pair.numel()
    if num_pairs > MAX_PAIRS:
        experts, order = expert_of_pair.sort(stable=True)
        bounds = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
        starts = torch.searchsorted(experts, bounds, out_int32=True)
        return expert_of_pair, order.to(torch.int32), starts
    order = expert_of_pair.new_empty(num_pairs, dtype=torch.int32)
    starts = expert_of_pair.new_empty(num_experts + 1, dtype=torch.int32)
    block = triton.next_power_of_2(num_pairs)
    _sort_pairs[(num_experts,)](expert_of_pair, order, starts, num_pairs, BLOCK=block)
    return expert_of_pair, order, starts
