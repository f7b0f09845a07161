"""Chosen experts are copied from host memory in whole lines, each once, and multiplied then."""

import torch
import triton
import triton.language as tl

from offplan.runtime.forms.reference import Parts

BLOCK = 1024
"""Words that a program copies at a time."""
LOOPS = 4
"""Times that it does."""


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    expert_of_pair, order, starts, own_starts, num_pairs, parts,
    BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """One program for a share of the words of the expert of one pair, the first that has it.

    Each of ``parts`` is where its words are, where they go, and how many an expert has.
    """
    slot = tl.program_id(1)
    expert = tl.load(expert_of_pair + tl.load(order + slot))
    first = tl.load(starts + expert)
    if tl.program_id(0) == 0:
        tl.store(own_starts + slot, tl.where(first == slot, slot, tl.load(starts + expert + 1)))
        tl.store(own_starts + num_pairs, num_pairs)
    if first != slot:
        return
    block = tl.program_id(0)
    for part in tl.static_range(len(parts)):
        source, target, words = parts[part]
        if (block >= 0) & (block * BLOCK * LOOPS < words):  # it is a share of this part
            for loop in range(LOOPS):
                at = (block * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
                inside = at < words
                copied = tl.load(source + tl.cast(expert, tl.int64) * words + at, mask=inside)
                tl.store(target + tl.cast(slot, tl.int64) * words + at, copied, mask=inside)
        block -= tl.cdiv(words, BLOCK * LOOPS)


def gather(
    parts: Parts, expert_of_pair: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> tuple[Parts, torch.Tensor]:
    """Copy the experts that pairs chose, each once, out of parts of [experts, ...].

    ``expert_of_pair`` is [pairs], ``order`` lists them by their expert, ``starts``, [experts + 1],
    where each one's begin in it. Returns parts of as many experts as there are pairs, of which the
    first pair of each expert has its weight and the others none, and where their pairs begin.
    """
    num_pairs, num_blocks = order.numel(), 0
    gathered: Parts = {}
    arguments: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for part, value in parts.items():
        source = value.view(torch.uint8).flatten(1)
        source = source.view(torch.int32) if source.shape[1] % 4 == 0 else source
        target = source.new_empty(num_pairs, source.shape[1])
        arguments.append((source, target, source.shape[1]))
        num_blocks += triton.cdiv(source.shape[1], BLOCK * LOOPS)
        gathered[part] = target.view(value.dtype).view(num_pairs, *value.shape[1:])
    own_starts = starts.new_empty(num_pairs + 1)
    _gather[(num_blocks, num_pairs)](
        expert_of_pair, order, starts, own_starts, num_pairs, tuple(arguments), BLOCK, LOOPS
    )
    return gathered, own_starts
