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
    """One new token, and a mask of the tokens up to it."""
    BLOCKS = "offplan_blocks"
    """One new token, and the blocks up to it for compiled attention."""
    POSITION = "offplan_position"
    """One new token, and its position for the kernels that read latents, or codes."""


@dataclass(frozen=True)
class Filled:
    """The filled part of the cache, as a pass tells all its layers in place of a mask."""

    way: Way
    mask: torch.Tensor | BlockMask
    """Four-dimensional, for transformers hands those on untouched."""


FindFilled = Callable[[torch.Tensor, int], Filled]
"""A call says it for one token of each sequence and a cache of so many tokens. The positions are
int64 of [batch] on the device."""


def filled_before(start: int, num_tokens: int, begun: int) -> Filled:
    """Say where a chunk begins, how long its prompt is, and where the pass begins to read it.

    The three are int32 on the host, [1, 1, 1, 3].
    """
    return Filled(Way.CHUNK, torch.tensor([[[[start, num_tokens, begun]]]], dtype=torch.int32))


def filled_up_to(position: torch.Tensor, context: int) -> Filled:
    """Hand on the positions themselves, for kernels that read them: [batch, 1, 1, 1]."""
    return Filled(Way.POSITION, position.view(-1, 1, 1, 1))


def filled_mask(position: torch.Tensor, context: int) -> Filled:
    """Mask the tokens up to each ``position``: bool on the device, [batch, 1, 1, context]."""
    filled = torch.arange(context, device=position.device) <= position[:, None]
    return Filled(Way.MASK, filled.view(-1, 1, 1, context))


def filled_blocks(position: torch.Tensor, context: int) -> Filled:
    """Make a block mask of the tokens up to each ``position``: attention reads none beyond.

    Built of device operations alone, so that a captured step follows the positions.
    """
    num_blocks, batch = -(-context // BLOCK_TOKENS), len(position)
    used = (position // BLOCK_TOKENS + 1).to(torch.int32).view(batch, 1, 1)
    order = torch.arange(num_blocks, dtype=torch.int32, device=position.device)

    mask = BlockMask.from_kv_blocks(
        used,
        order.expand(batch, 1, 1, num_blocks).contiguous(),
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=lambda row, head, query, key: key <= position[row],
        seq_lengths=(1, context),
    )
    return Filled(Way.BLOCKS, mask)
