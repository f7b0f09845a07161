"""Chosen experts are copied from host memory in whole lines, each once, and multiplied then."""

import torch
import triton
import triton.language as tl

from offplan.kernel_sizes import MAX_PAIRS
from offplan.runtime.forms.declared import declare
from offplan.runtime.forms.reference import Components

BLOCK = 1024
"""Words that a program copies at a time."""
LOOPS = 4
"""Times that it does."""
MAX_PARTS = 5
"""Parts of a weight that have something of each expert, at most."""


@triton.jit
def _copy(source, target, words, block, expert, slot, BLOCK: tl.constexpr, LOOPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a share of one expert's words; do nothing if ``block`` is another part's."""
    if source is not None:  # noqa: SIM102 (a constant, apart from what is computed)
        if (block >= 0) & (block * BLOCK * LOOPS < words):
            for loop in range(LOOPS):
                at = (block * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
                inside = at < words
                copied = tl.load(source + tl.cast(expert, tl.int64) * words + at, mask=inside)
                tl.store(target + tl.cast(slot, tl.int64) * words + at, copied, mask=inside)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    expert_of_pair, order, starts, own_starts, num_pairs, num_experts,
    a, to_a, words_a, b, to_b, words_b, c, to_c, words_c, d, to_d, words_d,
    e, to_e, words_e,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
):  # fmt: skip
    """One program for a share of the words of the expert of one pair, the first that has it.

    Pairs behind the last expert's have none, and are in no order.

    Each part has arguments of its own: compiled layers launch this kernel, and torch.compile ends
    its graph at a kernel that takes a tuple. Layers that read in place would then round elsewhere
    than resident ones.
    """
    slot = tl.program_id(1)
    end = tl.load(starts + num_experts)
    is_listed = slot < end
    pair = tl.load(order + slot, mask=is_listed, other=0)
    expert = tl.load(expert_of_pair + pair, mask=is_listed, other=num_experts - 1)
    first = tl.load(starts + expert)
    if tl.program_id(0) == 0:
        tl.store(own_starts + slot, tl.where(first == slot, slot, tl.load(starts + expert + 1)))
        tl.store(own_starts + num_pairs, end)
    if (first != slot) | (slot >= end):
        return
    block = tl.program_id(0)
    SIZE: tl.constexpr = BLOCK * LOOPS
    _copy(a, to_a, words_a, block, expert, slot, BLOCK, LOOPS)
    block -= tl.cdiv(words_a, SIZE)
    _copy(b, to_b, words_b, block, expert, slot, BLOCK, LOOPS)
    block -= tl.cdiv(words_b, SIZE)
    _copy(c, to_c, words_c, block, expert, slot, BLOCK, LOOPS)
    block -= tl.cdiv(words_c, SIZE)
    _copy(d, to_d, words_d, block, expert, slot, BLOCK, LOOPS)
    block -= tl.cdiv(words_d, SIZE)
    _copy(e, to_e, words_e, block, expert, slot, BLOCK, LOOPS)


def gather(
    parts: Components, expert_of_pair: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> tuple[Components, torch.Tensor]:
    """Copy the experts that pairs chose, each once, out of parts of [experts, ...].

    ``expert_of_pair`` is [pairs], ``order`` lists them by their expert, ``starts``, [experts + 1],
    where each one's begin in it. Returns parts of as many experts as there are pairs, and where
    their pairs begin. The first pair of each expert has its weight, and the others none. Pairs
    whose expert does not exist have none, in ``starts`` as here.
    """
    num_pairs, num_blocks = order.numel(), 0
    gathered: Components = {}
    arguments: list[torch.Tensor | int | None] = []
    for part, value in parts.items():
        source = value.view(torch.uint8).flatten(1)
        source = source.view(torch.int32) if source.shape[1] % 4 == 0 else source
        target = source.new_empty(num_pairs, source.shape[1])
        arguments += [source, target, source.shape[1]]
        num_blocks += triton.cdiv(source.shape[1], BLOCK * LOOPS)
        gathered[part] = target.view(value.dtype).view(num_pairs, *value.shape[1:])
    arguments += [None, None, 0] * (MAX_PARTS - len(parts))
    own_starts = starts.new_empty(num_pairs + 1)
    _gather[(num_blocks, num_pairs)](
        expert_of_pair, order, starts, own_starts, num_pairs, starts.numel() - 1, *arguments,
        BLOCK=BLOCK, LOOPS=LOOPS,
    )  # fmt: skip
    return gathered, own_starts


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
        # numbers of 16 bits are sorted in two passes over them, 0.03 ms a layer instead of 0.08
        dtype = torch.int16 if num_experts < 1 << 15 else torch.int32
        experts, order = expert_of_pair.to(dtype).sort(stable=True)
        bounds = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
        starts = torch.searchsorted(experts, bounds, out_int32=True)
        return expert_of_pair, order.to(torch.int32), starts
    return (expert_of_pair, *_sort_few(expert_of_pair, num_experts))


def _empty_order(
    expert_of_pair: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    order = expert_of_pair.new_empty(expert_of_pair.numel(), dtype=torch.int32)
    return order, expert_of_pair.new_empty(num_experts + 1, dtype=torch.int32)


# an operator, of which a compiled step finds that its router has made the same
@declare("sort_pairs", "(Tensor expert_of_pair, int num_experts) -> (Tensor, Tensor)", _empty_order)
def _sort_few(expert_of_pair: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    order, starts = _empty_order(expert_of_pair, num_experts)
    num_pairs = expert_of_pair.numel()
    block = triton.next_power_of_2(num_pairs)
    _sort_pairs[(num_experts,)](expert_of_pair, order, starts, num_pairs, BLOCK=block)
    return order, starts
