"""Launches the kernels that multiply and expand weights in their stored form. CUDA only."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton

from offplan.forms.form import Component, Form, Kind
from offplan.kernel_sizes import IN_PLACE_ROWS, LINE_BYTES, MIN_ROWS, PAIR_ROWS
from offplan.runtime.forms import kernels, packed_kernels
from offplan.runtime.forms.gather import sort_pairs
from offplan.runtime.forms.operands import Layout, Operands, is_stacked, operands_of
from offplan.runtime.forms.reference import Components, restore_order
from offplan.runtime.forms.runnable import BLOCK_OUT
from offplan.runtime.gpu_limits import gpu_limits

SPLIT_PROGRAMS = 2048
"""Programs that a product of few rows is split into, at most, by the length of its rows.

Source: 12,288 x 4,096 of FP8 on an H200 took 17 us in four parts of 192 programs each, 24 in one.
"""
ADDED = 512
"""Products whose parts a program adds: 24 programs for 8 rows of 1,536."""
EACH_OUT, EACH_ELEMENTS, EACH_WARPS = 8, 128, 2
"""Rows, and words of each, that a program multiplies by one input at a time, and its warps.

Source: an H200, beside 16 rows of 64 words by 4 warps. 12,288 x 4,096 of W4A16 takes 16 us for 19,
and 8 experts of 1,536 x 2,048 13 for 12. Four of gpt-oss-20b's take 24 us for 26, and in place 742
for 800.
"""
PACKED_OUT, PACKED_ELEMENTS = 16, 64
"""The same of packed weights, by 4 warps."""
AMID_ROWS = 64
"""Inputs up to which a tile in host memory is not loaded ahead, where rows begin amid a line.

What is loaded ahead by 16 bytes passes the cache in which rows share lines. Source: experts of
gpt-oss-20b on an H200. 16 / 64 / 256 tokens take 5.5 / 6.3 / 7.7 ms so, and 6.2 / 7.0 / 7.1 loaded
ahead. Loaded by words they take 5.8 / 7.6 / 8.8. ``kernels.multiply_each`` loads nothing ahead in
host memory: four by one input take 742 us for 864, and eight of W4A16 whose rows begin with a line
959 for 957.
"""
EACH_REGISTERS = 80
"""Registers of a thread that multiplies packed weights by one input, at most.

Source: a layer of Qwen3-8B on an H200 took 129 us so, and 132 with the 92 that the compiler takes.
"""
EXPANDED_ROWS, EXPANDED_WORDS = 4, 256
"""Rows of packed weights that a program expands, and words of their exponents at a time.

Source: 12,288 x 4,096 on an H200 took 49 us so, and 51 to 63 with 8 rows or fewer words.
"""
FLAT_WORDS = 128
"""Words that a program expands at a time, four times over, where rows do not matter."""
EACH_ROWS = 1
"""Inputs, of a weight or on average of an expert, up to which each is multiplied by itself.

Source: ``gate_up_proj`` of gpt-oss-20b on an H200. 1 / 8 / 16 tokens take 28 / 183 / 355 us each by
itself, 47 / 211 / 288 us by tensor cores.
"""
STAGES = 3
"""Tiles that a program has on their way at a time, at most."""
PACKED_STAGES, MANY_ROWS = 2, 32
"""The same of packed weights, where a program has so many inputs or more.

Source: a layer of Qwen3-8B at 32 rows on an H200 took 134 us so, and 146 with STAGES.
"""
PACKED_PROGRAMS = 512
"""SPLIT_PROGRAMS of packed weights; twice as many where a program has more than MANY_ROWS.

Source: 24,576 x 4,096 on an H200. 32 rows took 52 us whole and 57 in two parts. 64 rows took 80 us
whole, 76 in two and 81 in three.
"""
TABLE_BYTES = 24
"""Bytes of shared memory for each weight that is looked up in a table, where others are decoded."""


def expand_on_gpu(
    form: Form, parts: Components, dtype: torch.dtype, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values of a weight, [..., out, in], in ``dtype``: in ``scratch`` if there is one.

    That is flat, of ``dtype``, and as long as there are values, or longer.
    """
    weight = operands_of(form, parts)
    num_experts, num_out, length = weight.num_experts, weight.num_out, weight.length
    make_room = partial(_make_room, form, parts, weight)
    values = make_room(dtype, scratch)
    if form.kind is Kind.PACKED:  # each program makes whole rows of words of two values
        out = values if dtype == torch.bfloat16 else make_room(torch.bfloat16)
        packed_kernels.expand[(num_out // EXPANDED_ROWS, num_experts)](
            out.view(torch.int32), None, num_out, length, *weight.arguments, **weight.constants,
            BLOCK_N=EXPANDED_ROWS, BLOCK_K=EXPANDED_WORDS,
        )  # fmt: skip
        return out.to(dtype)
    if weight.pack == 1:
        chunk = min(16, weight.constants["FORM"].elements)
        kernels.expand[(triton.cdiv(num_out, 8), triton.cdiv(length, 16 * chunk), num_experts)](
            values, num_out, length, *weight.arguments, **weight.constants,
            BLOCK_N=8, GROUPS=16, CHUNK=chunk,
        )  # fmt: skip
    elif is_flat(weight):
        num_words = num_experts * num_out * length
        kernels.expand_flat[(triton.cdiv(num_words, 4 * FLAT_WORDS),)](
            values, num_words, *weight.arguments, **weight.constants, BLOCK=FLAT_WORDS
        )
    else:
        kernels.expand_words[(triton.cdiv(num_out, 2), triton.cdiv(length, 128), num_experts)](
            values, num_out, length, *weight.arguments, **weight.constants,
            BLOCK_N=2, BLOCK_K=128, num_warps=8,
        )  # fmt: skip
    return values.copy_(restore_order(parts, values)) if Component.GROUP_INDEX in parts else values


def is_flat(weight: Operands) -> bool:
    """Return True if a weight in words has one scale for each so many of them, whatever its rows.

    Programs begin with a scale.
    """
    layout: Layout = weight.constants["FORM"]
    is_scaled = layout.zero in ("", "middle") and not layout.whole and layout.code != "table"
    is_whole = weight.length % layout.elements == 0 == 4 * FLAT_WORDS % layout.elements
    return is_scaled and layout.rows == 1 and is_whole


def gather_rows(form: Form, parts: Components, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a packed weight, chosen by int64 of [rows], as bfloat16 of [rows, in]."""
    weight = operands_of(form, parts)
    num_in = weight.length * weight.pack
    out = torch.empty(len(rows), num_in, dtype=torch.bfloat16, device=rows.device)
    packed_kernels.expand[(len(rows), 1)](
        out.view(torch.int32), rows.contiguous(), weight.num_out, weight.length,
        *weight.arguments, **weight.constants, BLOCK_N=1, BLOCK_K=EXPANDED_WORDS,
    )  # fmt: skip
    return out


def empty_values(form: Form, parts: Components, dtype: torch.dtype) -> torch.Tensor:
    """Return room for the values of a weight, [..., out, in], where its parts are."""
    return _make_room(form, parts, operands_of(form, parts), dtype)


def _make_room(
    form: Form,
    parts: Components,
    weight: Operands,
    dtype: torch.dtype,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    stack = (weight.num_experts,) if is_stacked(form, parts) else ()
    shape = *stack, weight.num_out, weight.length * weight.pack
    if scratch is None:
        return torch.empty(shape, dtype=dtype, device=parts[Component.WEIGHT].device)
    return scratch[: prod(shape)].view(shape)


def multiply_rows(form: Form, parts: Components, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [rows, in], by a weight: [rows, out]. Rows may be what ``lay_out`` makes."""
    num_rows = x.shape[-2]
    block_m = max(MIN_ROWS, min(128, triton.next_power_of_2(num_rows)))
    x, parts = sort_inputs(x, parts)
    return _multiply(form, parts, x, num_rows, None, block_m)


def multiply_pairs(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    """Multiply each pair's row of ``x``, [rows, in], by its expert's weight: [pairs, out].

    ``order`` lists the pairs by their expert, ``starts``, [experts + 1], where each one's begin in
    it. Pairs are dealt out evenly: row r of R serves those from r x pairs / R on. ``in_place`` says
    that the weight lies in host memory, of which nothing is to cross twice.
    """
    # so many times what an expert has on average that those of most, or nearly all, are one block
    spread, most = (8, IN_PLACE_ROWS) if in_place else (2, PAIR_ROWS)
    num_pairs = order.numel()
    of_expert = spread * num_pairs // (starts.numel() - 1)
    block_m = max(MIN_ROWS, min(most, triton.next_power_of_2(of_expert)))
    if Component.GROUP_INDEX in parts:
        x, parts, order, starts = _sort_each(x, parts, order, starts)
    pairs = order, starts
    made = _multiply(form, parts, x, order.numel(), pairs, block_m, in_place=in_place)
    return made.view(num_pairs, -1)


def multiply_slots(
    form: Form, parts: Components, rest: Components, x: torch.Tensor, *pairs: torch.Tensor
) -> torch.Tensor:
    """Multiply each pair's row of ``x``, [rows, in], by its expert's weight: [pairs, out].

    ``parts`` are those of slots, [slots, ...]. The first two of ``pairs`` list the pairs by slot,
    and where each slot's begin, as of ``multiply_pairs`` with as many slots as experts. ``rest``
    are the parts of all experts, in host memory, and the last two list the pairs that have no slot
    by expert; without ``rest`` all have one. The result is bit for bit what ``multiply_pairs``
    makes of all experts in GPU memory.
    """
    order, starts, *others = pairs
    of_expert = 2 * order.numel() // (starts.numel() - 1)
    block_m = max(MIN_ROWS, min(PAIR_ROWS, triton.next_power_of_2(of_expert)))
    more = [(rest, (others[0], others[1]))] if rest else []
    own = order, starts
    made = _multiply(form, parts, x, order.numel(), own, block_m, more)
    return made.view(order.numel(), -1)


def sort_inputs(x: torch.Tensor, parts: Components) -> tuple[torch.Tensor, Components]:
    """Return rows, [..., in], with inputs in the order that a weight has them in, and its parts.

    These are then those of a weight whose inputs are in their own.
    """
    if Component.GROUP_INDEX not in parts:
        return x, parts
    order, others = _split_order(parts)
    return x.index_select(-1, order[0]), others


def _split_order(parts: Components) -> tuple[torch.Tensor, Components]:
    # a pass that only allocates may find a slot of the ring not yet filled
    order = parts[Component.GROUP_INDEX]
    order = order.clamp(0, order.shape[-1] - 1)
    return order, {
        part: value for part, value in parts.items() if part is not Component.GROUP_INDEX
    }


def _sort_each(
    x: torch.Tensor, parts: Components, order: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, Components, torch.Tensor, torch.Tensor]:
    """Do the same for each pair, whose expert has an order for each matrix that it is joined of.

    Each of these is then an expert, and each pair one with each of them.
    """
    inputs, others = _split_order(parts)
    num_experts, joined, _ = inputs.shape
    num_pairs = order.numel()
    experts = torch.repeat_interleave(starts.diff(), output_size=num_pairs)
    experts = torch.empty_like(experts).scatter_(0, order.long(), experts)[:, None]
    matrices = (experts * joined + torch.arange(joined, device=x.device)).flatten()
    rows = x.repeat_interleave(len(matrices) // len(x), 0)
    parts = {part: value.unflatten(1, (joined, -1)).flatten(0, 1) for part, value in others.items()}
    rows = rows.gather(1, inputs.flatten(0, 1)[matrices].long())
    return rows, parts, *sort_pairs(matrices, num_experts * joined)[1:]


def choose_tile(weight: Operands, block_m: int, shared_bytes: int) -> tuple[int, int]:
    """Choose the elements of a row that a program takes at once, and how many tiles of them.

    A tile is one of the weight and one of ``block_m`` inputs in each plane. Source: triton 3.6
    compiles the kernels of words for compute capability 9.0 to 0.75 to 0.96 of the shared memory
    that this function estimates.
    """
    layout: Layout | None = weight.constants.get("FORM")
    extra = TABLE_BYTES * BLOCK_OUT if layout and layout.code == "table" else 0
    of_element = weight.pack * block_m * 2 + BLOCK_OUT * weight.element_bytes
    block_k = weight.block_k
    while True:
        num_stages = min(STAGES, (shared_bytes - extra * block_k) // (of_element * block_k))
        if num_stages > 1 or block_k == MIN_ROWS:
            return block_k, max(1, num_stages)
        block_k //= 2


PER_WORD = dict.fromkeys((Kind.MXFP4, Kind.NVFP4, Kind.NF4, Kind.FP4, Kind.W4A16), 8)
"""Weights in an element, of the kinds that have several."""


def lay_out(form: Form, parts: Components, x: torch.Tensor) -> torch.Tensor:
    """Lay inputs, [rows, in], out by their place in an element: [places, rows, elements].

    Weights of one element meet inputs of separate planes, which are read in a row. Inputs that lie
    so already, that are yet to be sorted, or that meet weights one by one, stay as they are.
    """
    pack = PER_WORD.get(form.kind, 1)
    if pack == 1 or x.ndim == 3 or Component.GROUP_INDEX in parts:
        return x
    return x.unflatten(-1, (-1, pack)).permute(2, 0, 1).contiguous()


def _planes_of(form: Form, parts: Components, x: torch.Tensor) -> torch.Tensor:
    """Lay inputs out. Packed weights take them as they are, in words of two."""
    x = lay_out(form, parts, x).contiguous()
    return x if form.kind is not Kind.PACKED or x.data_ptr() % 4 == 0 else x.clone()


def _multiply(
    form: Form,
    parts: Components,
    x: torch.Tensor,
    num_pairs: int,
    pairs: tuple[torch.Tensor, torch.Tensor] | None,
    block_m: int,
    more: Sequence[tuple[Components, tuple[torch.Tensor, torch.Tensor]]] = (),
    *,
    in_place: bool = False,
    beside: Sequence[Components] = (),
) -> torch.Tensor:
    """Multiply as ``multiply_rows`` and ``multiply_pairs`` do: [pairs, out].

    ``in_place`` says that ``parts`` lie in host memory. ``more`` do: they are the same experts'
    parts, with the pairs that these multiply. ``beside`` are other weights that rows are multiplied
    by: their products follow one another.
    """
    weight = operands_of(form, parts)
    if pairs is not None:  # of which slots may hold fewer
        weight = weight._replace(num_experts=pairs[1].numel() - 1)
    way = _choose_way(
        form, weight, num_pairs, block_m, gpu_limits(x.device.index)[0], pairs is None
    )
    num_out, length, splits = weight.num_out, weight.length, way.splits
    split = triton.cdiv(triton.cdiv(length, splits), way.block_k) * way.block_k
    others = [operands_of(form, each) for each in beside]
    num_blocks_out, further = _lay_out(weight, others, way.block_n)
    shape: tuple[int, ...] = num_pairs, num_out
    if others:
        shape = (num_pairs * sum(each.num_out for each in (weight, *others)),)
    out = x.new_empty(splits, *shape, dtype=torch.float32 if splits > 1 else x.dtype)
    planes = _planes_of(form, parts, x)
    per_row = num_pairs // x.shape[-2]
    # pairs of an expert in host memory are one program's, so that it crosses once
    there = IN_PLACE_ROWS if way.by_one else block_m, way.stages_there
    here = 1 if way.by_one else block_m, way.num_stages
    own = there if in_place else here
    sources = [(weight, pairs, own), *((operands_of(form, rest), of, there) for rest, of in more)]
    for source, of_source, (most_rows, num_stages) in sources:
        way.kernel[(num_blocks_out, way.num_blocks, splits)](
            planes, out, *(of_source or (None, None)),
            num_pairs, num_out, length, split, per_row, weight.num_experts, further,
            *source.arguments,
            **source.constants,
            EXPERTS=0 if pairs is None else triton.next_power_of_2(weight.num_experts),
            BLOCK_M=most_rows,
            BLOCK_N=way.block_n,
            BLOCK_K=way.block_k,
            num_stages=num_stages,
            **way.options,
        )  # fmt: skip
    if splits == 1:
        return out[0]
    made = x.new_empty(shape)
    size = made.numel()
    kernels.add_splits[(triton.cdiv(size, ADDED),)](made, out, size, SPLITS=splits, BLOCK=ADDED)
    return made


class _Way(NamedTuple):
    """The kernel that multiplies by a weight, its tiles, and how rows are split."""

    kernel: Any
    block_n: int
    block_k: int
    num_stages: int
    stages_there: int
    """The same of a weight in host memory. Words by one input have stages of their own."""
    num_blocks: int
    """Blocks of pairs."""
    splits: int
    options: dict[str, int]
    by_one: bool = False
    """True if the kernel multiplies by one input after another, and not by all at once."""


def _choose_way(
    form: Form, weight: Operands, num_pairs: int, block_m: int, shared_bytes: int, of_rows: bool
) -> _Way:
    block_k, num_stages = choose_tile(weight, block_m, shared_bytes)
    is_packed = form.kind is Kind.PACKED
    if is_packed and block_m >= MANY_ROWS:
        num_stages = min(num_stages, PACKED_STAGES)
    own_kernels: Any = packed_kernels if is_packed else kernels
    if weight.pack > 1 and num_pairs <= EACH_ROWS * weight.num_experts:
        tile, options = (EACH_OUT, EACH_ELEMENTS), {"num_warps": EACH_WARPS}
        if is_packed:
            tile, options = (PACKED_OUT, PACKED_ELEMENTS), {"maxnreg": EACH_REGISTERS}
        each = own_kernels.multiply_each
        return _Way(each, *tile, num_stages, num_stages, num_pairs, 1, options, by_one=True)
    num_blocks = triton.cdiv(num_pairs, block_m)
    if not of_rows:  # each expert's last block may be part of one
        num_blocks += min(weight.num_experts, num_pairs)
    programs = triton.cdiv(weight.num_out, BLOCK_OUT) * num_blocks
    most = PACKED_PROGRAMS * (1 + (block_m > MANY_ROWS)) if is_packed else SPLIT_PROGRAMS
    splits = max(1, min(4, most // programs, weight.length // (2 * block_k)))
    is_amid = weight.pack > 1 and not is_packed and 4 * weight.length % LINE_BYTES != 0
    there = 1 if is_amid and block_m <= AMID_ROWS else num_stages
    multiply = own_kernels.multiply
    return _Way(multiply, BLOCK_OUT, block_k, num_stages, there, num_blocks, splits, {})


def _lay_out(
    weight: Operands, others: Sequence[Operands], block_n: int
) -> tuple[int, tuple[int, ...] | None]:
    """Return the blocks of rows of all weights, and what ``kernels.find_weight`` is told of others.

    Distances are in elements of the tensors, wherever these lie.
    """
    num_blocks, told = triton.cdiv(weight.num_out, block_n), []
    for each in others:
        told += [each.num_out, num_blocks]
        for own, first in zip(each.arguments[0][:2], weight.arguments[0][:2], strict=True):
            distance, rest = divmod(own.data_ptr() - first.data_ptr(), own.itemsize)
            assert not rest  # weights begin at multiples of more bytes than an element has
            told.append(distance)
        num_blocks += triton.cdiv(each.num_out, block_n)
    return num_blocks, tuple(told) or None


def multiply_together(form: Form, weights: Sequence[Components], x: torch.Tensor) -> torch.Tensor:
    """Multiply rows, [rows, in], by several weights that ``are_alike``, in one launch.

    Returns the products by the first weight, [rows, out], then those by the next, all flat. They
    are bit for bit those of ``multiply_rows``.
    """
    first, *others = weights
    num_rows = x.shape[-2]
    block_m = max(MIN_ROWS, min(128, triton.next_power_of_2(num_rows)))
    return _multiply(form, first, x, num_rows, None, block_m, beside=others).flatten()


def are_alike(form: Form, weights: Sequence[Components], num_rows: int, device_index: int) -> bool:
    """Return True if ``multiply_together`` can multiply so many rows by these weights.

    Their rows are as long, what belongs to them is codes and scales, and one launch splits each as
    it is split alone.
    """
    if form.kind not in (Kind.FP8_BLOCK, Kind.FP8_CHANNEL, Kind.MXFP4, Kind.W4A16, Kind.W8A16):
        return False
    if any(Component.GROUP_INDEX in parts for parts in weights):
        return False
    found = [operands_of(form, parts) for parts in weights]
    layout: Layout = found[0].constants["FORM"]
    if layout.whole or layout.zero not in ("", "middle") or layout.code == "table":
        return False
    block_m = max(MIN_ROWS, min(128, triton.next_power_of_2(num_rows)))
    limit = gpu_limits(device_index)[0]
    ways = [_choose_way(form, each, num_rows, block_m, limit, True) for each in found]
    kinds = {
        (each.length, each.constants["FORM"], each.arguments[0].scale_columns) for each in found
    }
    return len(kinds) == 1 and len({way.splits for way in ways}) == 1
