"""Launches the products of many rows with experts' values, group of experts by group. CUDA only.

The values of a group's codes are made in a scratch, and multiplied there. The next group's are made
in the same memory: all of it is on the current stream.
"""

from typing import Any, NamedTuple

import torch
import triton

from offplan.forms.form import Form
from offplan.kernel_sizes import (
    FEW_EXPERT_ROWS,
    FEW_IN_PLACE_ROWS,
    experts_at_once,
    next_power,
    rows_in_place,
)
from offplan.runtime.forms import grouped_kernels, products
from offplan.runtime.forms.gates import Gate
from offplan.runtime.forms.operands import operands_of
from offplan.runtime.forms.reference import Components
from offplan.runtime.gpu_limits import compute_capability, gpu_limits


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
"""The tile of inputs that are read by pointers."""
DESCRIBED_TILE = Tile(num_warps=4, num_stages=3, programs=2, is_described=True)
"""The tile of inputs that are read by descriptors.

Source: 8,192 pairs of gpt-oss-20b on an H200 took 0.81 ms so, 0.89 with 8 warps, and 1.02 to 1.57
by pointers. All gave the same bits.
"""
LEAST_ROWS, FEW_ROWS_AN_EXPERT = 64, 48
"""Rows of a tile at least, and those of an expert on average up to which a tile has no more.

With fewer the matrix units of compute capability 9.0 lie idle. Source: experts of four models on an
H200. With 24 / 48 / 64 / 96 rows on average those of Qwen3-30B took 0.247 / 0.256 / 0.280 / 0.328
ms by tiles of 64, and 0.265 / 0.265 / 0.268 / 0.274 by 128.
"""
LEAST_EXPERTS = 32
"""Experts that a kernel is compiled for at least: groups of fewer need no kernel of their own."""
ADDED = 1024
"""Elements of a token that a program sums up."""
GATED = 1024
"""Gates of a row that a program computes."""


def multiply_codes(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows, [rows, in], each by its expert's weight, and add its bias: [rows, out].

    The rows are sorted by their experts; ``starts``, int32 [experts + 1], has where each one's
    begin. ``bias`` is [experts, out]. ``scratch`` is flat, of the type of the rows, and holds the
    values of ``experts_at_once`` or more.
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
        launch(values, x, starts, bias, out, first=first)
    return out


def multiply_values(
    values: torch.Tensor,
    x: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    """Multiply rows as ``multiply_codes`` does, by values, [experts, out, in], of any strides.

    ``in_place`` says that ``values`` lie in host memory.
    """
    if bias is None and not in_place and is_for_library(values, x):
        made: torch.Tensor = torch.nn.functional.grouped_mm(x, values.mT, offs=starts[1:])
        return made
    out = x.new_empty(len(x), values.shape[1])
    tile = choose_tile(values, x, len(values), in_place=in_place)
    launch(values, x, starts, bias, out, tile=tile)
    return out


def is_for_library(values: torch.Tensor, x: torch.Tensor) -> bool:
    """Return True if torch's grouped product is the faster one, and waits for nothing.

    Its kernels are for bfloat16 on compute capability 9.x and 10.x, and for rows that begin at
    multiples of 16 bytes. On 9.x few rows are ours.
    """
    aligned = all(each.data_ptr() % 16 == 0 for each in (x, values))
    aligned &= all(size % 8 == 0 for size in (*values.shape[1:], *values.stride()[:-1]))
    is_known = x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.is_contiguous()
    major = compute_capability(x.device.index)[0] if is_known else 0
    is_ours = len(x) <= FEW_EXPERT_ROWS * len(values) and can_describe(values, x)
    return major == 10 or (major == 9 and not is_ours)


def can_describe(values: torch.Tensor, x: torch.Tensor) -> bool:
    """Return True if descriptors read these inputs: on such a GPU, rows of whole 16 bytes."""
    aligned = all(each.data_ptr() % 16 == 0 and each.is_contiguous() for each in (x, values))
    is_known = aligned and x.shape[1] * x.itemsize % 16 == 0
    return is_known and compute_capability(x.device.index) >= (9, 0)


def choose_tile(
    values: torch.Tensor, x: torch.Tensor, num_experts: int, *, in_place: bool = False
) -> Tile:
    """Choose a tile for the rows ``x`` of so many experts: fewer rows where each has few.

    One of values in host memory has as many as it can: each tile reads them again. Products do not
    depend on it: each adds up its inputs in the same order.
    """
    tile = DESCRIBED_TILE if can_describe(values, x) else TILE
    if in_place:
        rows = min(rows_in_place(len(x), num_experts), next_power(max(LEAST_ROWS, len(x))))
        if rows <= tile.rows:
            return tile._replace(rows=rows)
        # more sums than fewer threads have registers for
        outs = tile.outs * FEW_IN_PLACE_ROWS // max(rows, FEW_IN_PLACE_ROWS)
        return tile._replace(rows=rows, outs=outs, num_warps=8, num_stages=3, programs=1)
    is_few = len(x) <= FEW_ROWS_AN_EXPERT * num_experts
    return tile._replace(rows=LEAST_ROWS) if is_few else tile


def launch(
    values: torch.Tensor,
    x: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tile: Tile | None = None,
    first: int = 0,
) -> None:
    """Multiply the rows of some experts, from expert ``first`` on, and write them to ``out``.

    ``values`` are those of these experts, [some, out, in]. A multiprocessor's programs take tiles
    in turn: the host does not know how many rows these experts have.
    """
    num_experts, num_out, num_in = values.shape
    x = x.contiguous()
    tile = tile or choose_tile(values, x, len(starts) - 1)
    shared_bytes, num_processors = gpu_limits(x.device.index)
    stage_bytes = (tile.rows + tile.outs) * tile.ins * x.itemsize
    inputs: tuple[Any, Any] = x, values
    if tile.is_described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        inputs = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.ins]),
            TensorDescriptor.from_tensor(values.flatten(0, 1), [tile.outs, tile.ins]),
        )
    most = triton.cdiv(len(x), tile.rows) + min(num_experts, len(x))
    grid = min(most * triton.cdiv(num_out, tile.outs), num_processors * tile.programs)
    grouped_kernels.multiply_groups[(grid,)](
        *inputs, out, starts, bias, first, num_experts, num_out, num_in, *values.stride(),
        EXPERTS=max(LEAST_EXPERTS, triton.next_power_of_2(num_experts)),
        WHOLE=num_in % tile.ins == 0,
        DESCRIBED=tile.is_described,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outs,
        BLOCK_K=tile.ins,
        num_warps=tile.num_warps,
        num_stages=max(1, min(tile.num_stages, shared_bytes // stage_bytes)),
    )  # fmt: skip


def gate_rows(made: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return the gated activation, [rows, width], of [rows, 2 x width]."""
    num_rows, width = made.shape[0], made.shape[1] // 2
    out = made.new_empty(num_rows, width)
    grouped_kernels.gate_rows[(num_rows, triton.cdiv(width, GATED))](
        made.contiguous(), out, width, gate.limit, gate.factor, gate.added,
        ACT=gate.activation, INTERLEAVED=gate.is_interleaved, LIMITED=gate.limited, BLOCK=GATED,
    )  # fmt: skip
    return out


def sum_pairs(
    made: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum up each token's products, rows of [tokens x choices, width], by [tokens, choices].

    ``rows``, int32 [tokens x choices], has the row of each pair, if they are in another order than
    the pairs. Returns [tokens, width]. Sums are float32 and rounded once.
    """
    num_tokens, num_chosen = weights.shape
    width = made.shape[-1]
    out = made.new_empty(num_tokens, width)
    grouped_kernels.sum_pairs[(num_tokens, triton.cdiv(width, ADDED))](
        made.contiguous(), rows, weights.contiguous(), out, width, CHOSEN=num_chosen, BLOCK=ADDED
    )
    return out
