"""Launches the products of many rows with experts' values, group of experts by group. CUDA only.

The values of a group's codes are made in a scratch, and multiplied there. The next group's are made
in the same memory: all of it is on the current stream.
"""

from typing import NamedTuple

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
ADDED = 1024
"""Elements of a token that a program sums up."""


def multiply_codes(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows, [rows, in], each by its expert's weight, and add its bias: [rows, out].

    Rows are sorted by their experts; ``starts``, int32 [experts + 1], says where each one's begin.
    The product of row m is written to row ``places[m]``, int32 [rows], if there are places.
    ``bias`` is [experts, out]. ``scratch`` is flat, of the type of ``x``, and holds the values of
    ``experts_at_once`` or more.
    """
    weight = operands_of(form, parts)
    num_values = weight.num_out * weight.length * weight.pack
    at_once = experts_at_once(weight.num_experts, num_values)
    if scratch is None:
        scratch = x.new_empty(at_once * num_values)
    out = x.new_empty(len(x), weight.num_out)
    for first in range(0, weight.num_experts, at_once):
        some = {part: value[first : first + at_once] for part, value in parts.items()}
        values = products.expand_on_gpu(form, some, x.dtype, scratch)
        launch(x, values, out, starts, places, bias, first)
    return out


def multiply_values(
    values: torch.Tensor,
    x: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows as ``multiply_codes`` does, by values, [experts, out, in], of any strides."""
    out = x.new_empty(len(x), values.shape[1])
    launch(x, values, out, starts, places, bias)
    return out


def launch(
    x: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor | None,
    bias: torch.Tensor | None,
    first: int = 0,
    tile: Tile | None = None,
) -> None:
    """Multiply the rows of some experts, from expert ``first`` on, and write them to ``out``.

    ``values`` are those of these experts, [some, out, in]. A multiprocessor's programs take tiles
    in turn: the host does not know how many rows these experts have.
    """
    num_experts, num_out, num_in = values.shape
    x, tile = x.contiguous(), tile or TILE
    mean = len(x) // (starts.numel() - 1)
    rows = min(tile.rows, max(LEAST_ROWS, triton.next_power_of_2(mean)))
    shared_bytes, num_processors = gpu_limits(x.device.index)
    stage_bytes = (rows + tile.outs) * tile.ins * x.itemsize
    most = triton.cdiv(len(x), rows) + min(num_experts, len(x))
    inputs: tuple[object, object] = x, values
    # those of descriptors lie at multiples of 16 bytes
    is_described = tile.is_described and values.is_contiguous() and num_in * x.itemsize % 16 == 0
    if is_described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        inputs = (
            TensorDescriptor.from_tensor(x, [rows, tile.ins]),
            TensorDescriptor.from_tensor(values.flatten(0, 1), [tile.outs, tile.ins]),
        )
    grid = min(most * triton.cdiv(num_out, tile.outs), num_processors * tile.programs)
    grouped_kernels.multiply_groups[(grid,)](
        *inputs, out, places, starts, bias, first, num_experts, num_out, num_in, *values.stride(),
        EXPERTS=triton.next_power_of_2(num_experts),
        WHOLE=num_in % tile.ins == 0,
        DESCRIBED=is_described,
        BLOCK_M=rows,
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
