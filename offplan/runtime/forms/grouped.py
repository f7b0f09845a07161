"""Launches the products of many rows with experts' values, group of experts by group. CUDA only.

The values of a group's codes are made in a scratch, and multiplied there. The next group's are made
in the same memory: all of it is on the current stream.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from offplan.forms.form import Form
from offplan.kernel_sizes import experts_at_once
from offplan.runtime.forms import grouped_kernels, products
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Components
from offplan.runtime.gpu_limits import gpu_limits


class Tile(NamedTuple):
    """The tile of a product that a program makes at a time."""

    rows: int = 128
    """Rows of an expert, at most."""
    outs: int = 128
    """Outputs."""
    ins: int = 64
    """Inputs that are read at a time."""
    num_warps: int = 8
    num_stages: int = 4
    """Tiles of inputs that a program has on their way at a time, at most."""
    programs: int = 1
    """Programs of a multiprocessor."""
    is_described: bool = False
    """True if inputs are read by descriptors, which compute capability 9.0 has instructions for."""


TILE = Tile()
"""Source: estimated; not yet measured."""
LEAST_ROWS = 64
"""Rows of a tile at least: with fewer the matrix units of compute capability 9.0 lie idle."""
LEAST_EXPERTS = 32
"""Experts that a kernel is compiled for at least: groups of fewer need no kernel of their own."""
ADDED = 1024
"""Elements of a token that a program sums up."""


def multiply_codes(
    form: Form,
    parts: Components,
    pairs: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows, [rows, in], each by its expert's weight, and add its bias: [rows, out].

    ``pairs`` are the rows, sorted by their experts; int32 [experts + 1], where each one's begin;
    and, if products are to be in another order, the row that each row's is written to, int32
    [rows]. ``bias`` is [experts, out]. ``scratch`` is flat, of the type of the rows, and holds the
    values of ``experts_at_once`` or more.
    """
    x = pairs[0]
    weight = operands_of(form, parts)
    num_values = weight.num_out * weight.length * weight.pack
    at_once = experts_at_once(weight.num_experts, num_values)
    if scratch is None:
        scratch = x.new_empty(at_once * num_values)
    out, tile = x.new_empty(len(x), weight.num_out), choose_tile(len(x), weight.num_experts)
    for first in range(0, weight.num_experts, at_once):
        some = {part: value[first : first + at_once] for part, value in parts.items()}
        values = products.expand_on_gpu(form, some, x.dtype, scratch)
        launch(values, pairs, bias, out, tile, first)
    return out


def multiply_values(
    values: torch.Tensor, pairs: Sequence[torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows as ``multiply_codes`` does, by values, [experts, out, in], of any strides."""
    x, num_experts = pairs[0], len(values)
    out = x.new_empty(len(x), values.shape[1])
    launch(values, pairs, bias, out, choose_tile(len(x), num_experts))
    return out


def choose_tile(num_rows: int, num_experts: int) -> Tile:
    """Choose a tile of fewer rows where experts have fewer on average.

    Products do not depend on it: each adds up its inputs in the same order.
    """
    mean = triton.next_power_of_2(max(1, num_rows // num_experts))
    return TILE._replace(rows=min(TILE.rows, max(LEAST_ROWS, mean)))


def launch(
    values: torch.Tensor,
    pairs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    first: int = 0,
) -> None:
    """Multiply the rows of some experts, from expert ``first`` on, and write them to ``out``.

    ``values`` are those of these experts, [some, out, in]. A multiprocessor's programs take tiles
    in turn: the host does not know how many rows these experts have.
    """
    x, starts, *places = pairs
    num_experts, num_out, num_in = values.shape
    x = x.contiguous()
    shared_bytes, num_processors = gpu_limits(x.device.index)
    stage_bytes = (tile.rows + tile.outs) * tile.ins * x.itemsize
    inputs: tuple[Any, Any] = x, values
    # rows that descriptors read begin at multiples of 16 bytes
    is_described = tile.is_described and values.is_contiguous() and num_in * x.itemsize % 16 == 0
    if is_described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        inputs = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.ins]),
            TensorDescriptor.from_tensor(values.flatten(0, 1), [tile.outs, tile.ins]),
        )
    most = triton.cdiv(len(x), tile.rows) + min(num_experts, len(x))
    grid = min(most * triton.cdiv(num_out, tile.outs), num_processors * tile.programs)
    grouped_kernels.multiply_groups[(grid,)](
        *inputs, out, places[0] if places else None, starts, bias, first, num_experts,
        num_out, num_in, *values.stride(),
        EXPERTS=max(LEAST_EXPERTS, triton.next_power_of_2(num_experts)),
        WHOLE=num_in % tile.ins == 0,
        DESCRIBED=is_described,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outs,
        BLOCK_K=tile.ins,
        num_warps=tile.num_warps,
        num_stages=max(1, min(tile.num_stages, shared_bytes // stage_bytes)),
    )  # fmt: skip


def sum_pairs(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum up each token's products, [tokens x choices, width], by weights, [tokens, choices].

    Returns [tokens, width]. Sums are float32 and rounded once.
    """
    num_tokens, num_chosen = weights.shape
    width = made.shape[-1]
    out = made.new_empty(num_tokens, width)
    grouped_kernels.sum_pairs[(num_tokens, triton.cdiv(width, ADDED))](
        made.contiguous(), weights.contiguous(), out, width, CHOSEN=num_chosen, BLOCK=ADDED
    )
    return out
