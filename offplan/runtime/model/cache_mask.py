"""The filled part of the cache, and the ways in which attention is told where it ends."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK_TOKENS = 128
"""Cached tokens that compiled attention takes or skips as one."""


class Way(str, Enum):
    """A way to tell attention what is filled, by its name among transformers' attentions.

    A pass chooses one for all layers. transformers builds no mask for names that it does not know.
    """

    CHUNK = "offplan_chunk"
    """A chunk of a prompt; where it begins and how long the prompt is are on the host."""
    MASK = "offplan_mask"
    """New tokens of a step, and a mask of the tokens up to each."""
    BLOCKS = "offplan_blocks"
    """New tokens of a step, and the blocks up to the last for compiled attention."""
    POSITION = "offplan_position"
    """New tokens of a step, and their positions for the kernels that read latents, or codes."""


@dataclass(frozen=True)
class Filled:
    """The filled part of the cache, as a pass tells all its layers in place of a mask."""

    way: Way
    mask: torch.Tensor | BlockMask
    """Four-dimensional, for transformers hands those on untouched."""


FindFilled = Callable[[torch.Tensor, int], Filled]
"""A call says it for the new tokens of each sequence and a cache of so many tokens. The positions
are int64 of [batch, new] on the device, ``new`` being 1 or ``batch`` 1."""


def filled_before(start: int, num_tokens: int, begun: int) -> Filled:
    """Say where a chunk begins, how long its prompt is, and where the pass begins to read it.

    The three are int32 on the host, [1, 1, 1, 3].
    """
    return Filled(Way.CHUNK, torch.tensor([[[[start, num_tokens, begun]]]], dtype=torch.int32))


def filled_up_to(position: torch.Tensor, context: int) -> Filled:
    """Hand on the positions themselves, for kernels that read them: [batch, 1, new, 1]."""
    return Filled(Way.POSITION, position[:, None, :, None])


def filled_mask(position: torch.Tensor, context: int) -> Filled:
    """Mask the tokens up to each ``position``: bool on the device, [batch, 1, new, context]."""
    filled = torch.arange(context, device=position.device) <= position[..., None]
    return Filled(Way.MASK, filled[:, None])


def filled_blocks(position: torch.Tensor, context: int) -> Filled:
    """Make a block mask of the tokens up to each ``position``: attention reads none beyond.

    Several new tokens of a sequence are told apart by their heads, a head's tokens side by side.
    Built of device operations alone, so that a captured step follows the positions.
    """
    num_blocks, (batch, num_new) = -(-context // BLOCK_TOKENS), position.shape
    used = (position[:, -1] // BLOCK_TOKENS + 1).to(torch.int32).view(batch, 1, 1)
    order = torch.arange(num_blocks, dtype=torch.int32, device=position.device)
    first = position[:, 0]

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return key <= first[row]

    def sees_up_to_own(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return key <= first[row] + head % num_new

    mask = BlockMask.from_kv_blocks(
        used,
        order.expand(batch, 1, 1, num_blocks).contiguous(),
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=sees if num_new == 1 else sees_up_to_own,
        seq_lengths=(1, context),
    )
    return Filled(Way.BLOCKS, mask)
