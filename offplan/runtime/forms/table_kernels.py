"""Tables of the experts that are in GPU memory, by kernels: what ``expert_table`` does on the CPU.

Two launches a layer and step: one program takes the step's experts into the table, many copy those
that are missed over the link. Nothing of it is known to the host.
"""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from offplan.expert_slots import COUNTERS
from offplan.runtime.forms import expert_table
from offplan.runtime.forms.expert_table import Table

PAIRS = 16
"""Pairs of a token and an expert that the table's program compares with all experts at a time."""
BLOCK = 1024
"""Words of 4 bytes, or single bytes, that a program copies at a time."""
COPY_PROGRAMS = 256
"""Programs that copy; of 8 warps each, they have a MiB on its way.

Source: estimated; a link of 64 GB/s whose reads take 2 us needs 128 KiB.
"""

_COUNTERS = tl.constexpr(COUNTERS)
_NUM_USED = tl.constexpr(expert_table.NUM_USED)
_NUM_MISSED = tl.constexpr(expert_table.NUM_MISSED)
_FROM_PROMPT = tl.constexpr(expert_table.FROM_PROMPT)


@triton.jit
def _find(chosen, order, num_pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 for each expert of ``order`` that is among ``num_pairs`` chosen ones, else 0."""
    found = tl.zeros(order.shape, dtype=tl.int32)
    for first in range(0, num_pairs, PAIRS):
        p = first + tl.arange(0, PAIRS)
        pair = tl.load(chosen + p, mask=p < num_pairs, other=-1).to(tl.int32)
        is_same = (order[:, None] == pair[None, :]).to(tl.int32)
        found = tl.maximum(found, tl.max(is_same, 1))
    return found


@triton.jit
def _count(counts, which: tl.constexpr, more):  # type: ignore[no-untyped-def]
    tl.store(counts + which, tl.load(counts + which) + more.to(tl.int64))


@triton.jit
def _use(  # type: ignore[no-untyped-def]
    chosen, table, slot_of_pair, rest_of_pair, num_steps, num_pairs, num_slots, num_experts,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, IS_STEP: tl.constexpr,
):  # fmt: skip
    """One program: take the experts that steps chose into the table, by ``expert_table.use``.

    Everything is held by place in the order of use. Experts and slots are exchanged among threads
    through the table itself; a barrier is where one reads what another wrote.
    """
    lists = table + _COUNTERS
    missed_list = lists + 2 * num_experts
    slot_list = lists + 3 * num_experts
    freed_list = lists + 4 * num_experts
    i = tl.arange(0, EXPERTS)
    inside = i < num_experts
    order = tl.load(lists + i, mask=inside, other=-2)
    slots = tl.load(lists + num_experts + i, mask=inside & (i < num_slots), other=0)
    num_used = tl.load(table + _NUM_USED)
    if IS_STEP:
        used = _find(chosen, order, num_pairs, PAIRS)
        before = tl.cumsum(used, 0)
        rank = tl.where(used > 0, before - 1, tl.sum(used, 0) + i - before)
    else:
        # a bit for each step that used an expert, the last step's is the highest: experts go by it
        late = tl.zeros([EXPERTS], dtype=tl.int64)
        early = tl.zeros([EXPERTS], dtype=tl.int64)
        for step in range(0, num_steps):
            found = _find(chosen + step * num_pairs, order, num_pairs, PAIRS).to(tl.int64)
            bit = found << (step % 32)
            late = tl.where(step >= 32, late | bit, late)
            early = tl.where(step >= 32, early, early | bit)
        used = ((late | early) != 0).to(tl.int32)
        tl.store(missed_list + i, late.to(tl.int32), mask=inside)
        tl.store(slot_list + i, early.to(tl.int32), mask=inside)
        tl.debug_barrier()
        rank = tl.zeros([EXPERTS], dtype=tl.int32)
        for first in range(0, num_experts, 32):
            j = first + tl.arange(0, 32)
            is_expert = j < num_experts
            later = tl.load(missed_list + j, mask=is_expert, other=0).to(tl.int64) & 0xFFFFFFFF
            earlier = tl.load(slot_list + j, mask=is_expert, other=0).to(tl.int64) & 0xFFFFFFFF
            is_later = later[None, :] > late[:, None]
            is_same = later[None, :] == late[:, None]
            is_earlier = earlier[None, :] > early[:, None]
            is_first = (earlier[None, :] == early[:, None]) & (j[None, :] < i[:, None])
            comes = (is_later | (is_same & (is_earlier | is_first))) & is_expert[None, :]
            rank += tl.sum(comes.to(tl.int32), 1)
    has_slot = inside & (rank < num_slots)
    leaves = (inside & (i < num_slots) & (rank >= num_slots)).to(tl.int64)
    comes = has_slot & (i >= num_slots)
    missed = has_slot & (used > 0) & ((i >= num_slots) | (i >= num_used))
    # three counts in one: of those that leave, that come, and that are missed
    counted = leaves + (comes.to(tl.int64) << 20) + (missed.to(tl.int64) << 40)
    counted = tl.cumsum(counted, 0)
    nth_freed = (counted & 0xFFFFF).to(tl.int32) - 1
    nth_come = ((counted >> 20) & 0xFFFFF).to(tl.int32) - 1
    nth_missed = (counted >> 40).to(tl.int32) - 1
    tl.store(freed_list + nth_freed, slots, mask=leaves > 0)
    tl.debug_barrier()
    slots = tl.where(comes, tl.load(freed_list + nth_come, mask=comes, other=0), slots)
    tl.store(lists + rank, order, mask=inside)
    tl.store(lists + num_experts + rank, slots, mask=has_slot)
    tl.store(missed_list + nth_missed, order, mask=missed)
    tl.store(slot_list + nth_missed, slots, mask=missed)
    num_missed = tl.sum(missed.to(tl.int32), 0)
    tl.store(table + _NUM_MISSED, num_missed)
    is_new = (used > 0) & (i >= num_used)
    tl.store(table + _NUM_USED, num_used + tl.sum(is_new.to(tl.int32), 0))
    counts = table.to(tl.pointer_type(tl.int64), bitcast=True)
    if IS_STEP:
        num_chosen = tl.sum(used, 0)
        num_in_place = tl.sum((used > 0).to(tl.int32) * (rank >= num_slots).to(tl.int32), 0)
        _count(counts, 0, num_chosen - num_missed - num_in_place)
        _count(counts, 1, num_missed)
        _count(counts, 2, num_in_place)
        place = tl.where(has_slot, slots, num_experts)
        for first in range(0, num_pairs, PAIRS):
            p = first + tl.arange(0, PAIRS)
            is_pair = p < num_pairs
            pair = tl.load(chosen + p, mask=is_pair, other=-1).to(tl.int32)
            is_same = order[:, None] == pair[None, :]
            of_pair = tl.sum(tl.where(is_same, place[:, None], 0), 0)
            tl.store(slot_of_pair + p, of_pair, mask=is_pair)
            rest = tl.where(of_pair == num_experts, pair, num_experts)
            tl.store(rest_of_pair + p, rest, mask=is_pair)
    else:
        _count(counts, _FROM_PROMPT, num_missed)


@triton.jit
def _copy_missed(  # type: ignore[no-untyped-def]
    table, addresses, num_parts, slot_of_pair, order, starts, num_pairs, num_experts,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, IS_STEP: tl.constexpr,
):  # fmt: skip
    """Copy the experts that the table lists into their slots, a share of them by each program.

    In a step, one program a slot lists its pairs besides, as ``pairs.sort_pairs`` does.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if IS_STEP:  # noqa: SIM102 (a constant, apart from what is computed)
        if program < num_experts:
            p = tl.arange(0, PAIRS)
            slot_of = tl.load(slot_of_pair + p, mask=p < num_pairs, other=1 << 30)
            begin = tl.sum((slot_of < program).to(tl.int32), 0)
            is_own = slot_of == program
            nth = tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(order + begin + nth, p, mask=is_own)
            tl.store(starts + program, begin)
            if program == num_experts - 1:
                tl.store(starts + num_experts, begin + tl.sum(is_own.to(tl.int32), 0))
    num_missed = tl.load(table + _NUM_MISSED)
    if num_missed == 0:
        return
    missed_list = table + _COUNTERS + 2 * num_experts
    slot_list = missed_list + num_experts
    for part in range(0, num_parts):
        source = tl.load(addresses + 3 * part)
        target = tl.load(addresses + 3 * part + 1)
        num_bytes = tl.load(addresses + 3 * part + 2)
        if num_bytes % 16 == 0:
            # 16 bytes a thread: all of these are multiples, since parts begin on boundaries
            size = tl.multiple_of((num_bytes // 4).to(tl.int32), 4)
            num_blocks = tl.cdiv(size, BLOCK)
            for unit in range(program, num_missed * num_blocks, num_programs):
                nth = unit // num_blocks
                at = (unit - nth * num_blocks) * BLOCK + tl.arange(0, BLOCK)
                expert = tl.load(missed_list + nth).to(tl.int64)
                slot = tl.load(slot_list + nth).to(tl.int64)
                first = (source + expert * num_bytes).to(tl.pointer_type(tl.int32))
                own = (target + slot * num_bytes).to(tl.pointer_type(tl.int32))
                words = tl.load(tl.multiple_of(first + at, 16), mask=at < size)
                tl.store(tl.multiple_of(own + at, 16), words, mask=at < size)
        else:
            size = num_bytes.to(tl.int32)
            num_blocks = tl.cdiv(size, BLOCK)
            for unit in range(program, num_missed * num_blocks, num_programs):
                nth = unit // num_blocks
                at = (unit - nth * num_blocks) * BLOCK + tl.arange(0, BLOCK)
                expert = tl.load(missed_list + nth).to(tl.int64)
                slot = tl.load(slot_list + nth).to(tl.int64)
                first = (source + expert * num_bytes).to(tl.pointer_type(tl.int8))
                own = (target + slot * num_bytes).to(tl.pointer_type(tl.int8))
                tl.store(own + at, tl.load(first + at, mask=at < size), mask=at < size)


def address_parts(sources: Iterable[torch.Tensor], slots: Iterable[torch.Tensor]) -> torch.Tensor:
    """Say where the parts of experts and of slots lie: int64 of [parts, 3] on the slots' device.

    ``sources`` are [experts, ...], ``slots`` [slots, ...]; addresses, and bytes of one expert.
    """
    pairs = list(zip(sources, slots, strict=True))
    rows = [[of.data_ptr(), to.data_ptr(), to[0].nbytes] for of, to in pairs]
    return torch.tensor(rows, dtype=torch.int64, device=pairs[0][1].device)


SlotPairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The slot of each pair, the pairs by slot, where each slot's begin among them, and the expert of
each pair that has no slot."""


def _launch_use(
    table: torch.Tensor,
    chosen: torch.Tensor,
    num_slots: int,
    num_experts: int,
    outputs: Sequence[torch.Tensor],
    *,
    is_step: bool,
) -> None:
    num_steps, num_pairs = chosen.shape
    _use[(1,)](
        chosen, table, *outputs, num_steps, num_pairs, num_slots, num_experts,
        EXPERTS=max(16, triton.next_power_of_2(num_experts)),
        PAIRS=PAIRS,
        IS_STEP=is_step,
        num_warps=4,
    )  # fmt: skip


def _read(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
) -> SlotPairs:
    num_pairs = chosen.numel()
    slot_of_pair, order, starts, rest = _describe(chosen, table, addresses, num_slots, num_experts)
    outputs = slot_of_pair, rest
    _launch_use(table, chosen[None], num_slots, num_experts, outputs, is_step=True)
    _copy_missed[(max(COPY_PROGRAMS, num_experts),)](
        table, addresses, len(addresses), slot_of_pair, order, starts, num_pairs, num_experts,
        PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK=BLOCK,
        IS_STEP=True,
        num_warps=8,
    )  # fmt: skip
    return slot_of_pair, order, starts, rest


def _describe(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
) -> SlotPairs:
    of_pairs = (chosen.new_empty(chosen.numel(), dtype=torch.int32) for _ in range(3))
    slot_of_pair, order, rest = of_pairs
    return slot_of_pair, order, chosen.new_empty(num_experts + 1, dtype=torch.int32), rest


# That it changes table and slots is not declared: torch would copy them around the operator. What
# reads slots takes what this returns, and all of a session runs on one stream.
_operator = torch.library.custom_op(
    "offplan::read_slots",
    _read,
    mutates_args=(),
    schema="(Tensor chosen, Tensor table, Tensor addresses, int num_slots, int num_experts) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
_operator.register_fake(_describe)


def read_slots(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
) -> SlotPairs:
    """Take the experts that a step's pairs chose, [pairs], into slots; copy those missed.

    ``table`` is the memory of a ``Table``. Pairs whose expert has no slot have ``num_experts`` as
    their slot; in the last of what is returned, those that have one have it as their expert.
    """
    if not torch.compiler.is_compiling():
        return _read(chosen, table, addresses, num_slots, num_experts)
    made: SlotPairs = _operator(chosen, table, addresses, num_slots, num_experts)
    return made


def settle(table: Table, chosen: torch.Tensor, addresses: torch.Tensor) -> None:
    """Take the experts that a prompt's last tokens chose, [tokens, pairs], and copy them."""
    memory = table.memory
    _launch_use(memory, chosen, table.num_slots, table.num_experts, (memory, memory), is_step=False)
    _copy_missed[(COPY_PROGRAMS,)](
        memory, addresses, len(addresses), memory, memory, memory, 0, table.num_experts,
        PAIRS=16,
        BLOCK=BLOCK,
        IS_STEP=False,
        num_warps=8,
    )  # fmt: skip
