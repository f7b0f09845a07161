"""Tables of the experts that are in GPU memory, by kernels: what ``expert_table`` does on the CPU.

Two launches a layer and step: one program takes the step's experts into the table, many copy those
that are missed over the link. Nothing of it is known to the host.
"""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from offplan.capabilities.cached_experts import (
    LATER_DEVIATIONS,
    LATER_FADES,
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
)
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import TABLE_COUNTERS
from offplan.runtime.cached_experts import expert_table
from offplan.runtime.cached_experts.expert_table import Runs, Table
from offplan.runtime.forms import tasks
from offplan.runtime.forms.declared import declare
from offplan.runtime.forms.gather import list_pairs
from offplan.runtime.forms.handover_kernels import BLOCK as COPIED
from offplan.runtime.forms.handover_kernels import copy_share, count_programs, ring

PAIRS = 16
"""Pairs that the table's program compares with all experts at a time, at most."""
BLOCK = 1024
"""Words of 4 bytes, or single bytes, that a program copies at a time."""
COPY_PROGRAMS = 256
"""Programs that copy; of 8 warps each, they have a MiB on its way.

Source: estimated; a link of 64 GB/s whose reads take 2 us needs 128 KiB.
"""

MOST_POLLS = 1 << 22
"""Looks at the word of a layer's later copies before they are given up: each takes 0.5 us or more.

Source: estimated. The copies of a step take 0.1 s on the slowest link.
"""

_COUNTERS = tl.constexpr(TABLE_COUNTERS)
_BY_CORES = tl.constexpr(expert_table.BY_CORES)
_SPLIT = tl.constexpr(expert_table.SPLIT)
_SPLIT_CHUNKS = tl.constexpr(expert_table.SPLIT_CHUNKS)
_NUM_MISSED = tl.constexpr(expert_table.NUM_MISSED)
_SPLIT_EXPERT = tl.constexpr(expert_table.SPLIT_EXPERT)
_NUM_CHUNKS = tl.constexpr(expert_table.NUM_CHUNKS)
_LATER = tl.constexpr(expert_table.LATER)
_QUOTA = tl.constexpr(expert_table.QUOTA)
_CREDIT = tl.constexpr(expert_table.CREDIT)
_NUM_STEPS = tl.constexpr(expert_table.NUM_STEPS)
_NUM_USED = tl.constexpr(expert_table.NUM_USED)
_NUM_RECENT = tl.constexpr(expert_table.NUM_RECENT)
_IS_IDLE = tl.constexpr(expert_table.IS_IDLE)
_SEQUENCE = tl.constexpr(expert_table.SEQUENCE)
_DONE = tl.constexpr(expert_table.DONE)
_HAS_FAILED = tl.constexpr(expert_table.HAS_FAILED)
_LIST_COUNT = tl.constexpr(expert_table.LIST_COUNT)
_LIST_SEQUENCE = tl.constexpr(expert_table.LIST_SEQUENCE)
_LIST_FAILED = tl.constexpr(expert_table.LIST_FAILED)
_LIST_PAIRS = tl.constexpr(expert_table.LIST_PAIRS)
_LATER_PARTS = tl.constexpr(LATER_PARTS)
_MOST_CREDIT = tl.constexpr(LATER_PARTS * MOST_LATER)
_LATER_STEPS = tl.constexpr(LATER_STEPS)
_LATER_FADES = tl.constexpr(LATER_FADES)
_LATER_VARIANCES = tl.constexpr(LATER_DEVIATIONS**2)
_NOBODY = tl.constexpr(expert_table.NOBODY)
_CHUNK_COLUMNS = tl.constexpr(CHUNK_COLUMNS)
_COLUMNS = tl.constexpr(3 + len(Runs._fields))
"""Numbers of a row of ``address_parts``."""


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
def _count_both(a, b):  # type: ignore[no-untyped-def]
    """Return how many of two masks lie before each place, by one scan."""
    both = tl.cumsum(a.to(tl.int64) + (b.to(tl.int64) << 32), 0)
    return (both & 0xFFFFFFFF).to(tl.int32) - a, (both >> 32).to(tl.int32) - b


@triton.jit
def _await_copies(table, later, MOST_POLLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until what the layer's last step listed for later is copied; give up after MOST_POLLS.

    A stream of the host's own copies it, and then writes the word. Nothing else of this step waits.
    """
    sequence = tl.load(table + _SEQUENCE)
    done = tl.load(table + _DONE)
    if (done != sequence) & (tl.load(table + _HAS_FAILED) == 0):
        polls = 0
        while (done != sequence) & (polls < MOST_POLLS):
            done = tl.atomic_add(table + _DONE, 0, sem="acquire", scope="sys")
            polls += 1
        if done != sequence:  # the host is told; the layer waits no more, and brings none
            tl.store(table + _HAS_FAILED, 1)
            tl.store(later + _LIST_FAILED, 1)
            tl.debug_barrier()  # all threads are to count alike


@triton.jit
def _count_later(table, most, num_used, num_recent, num_slots, num_experts):  # type: ignore[no-untyped-def]
    """Count the experts that a step brings for later, as ``expert_table._count_later`` does."""
    credit = tl.minimum(tl.load(table + _CREDIT) + tl.load(table + _QUOTA), _MOST_CREDIT)
    steps = tl.load(table + _NUM_STEPS) + 1
    used = tl.load(table + _NUM_USED) + num_used
    recent = tl.load(table + _NUM_RECENT) + num_recent
    is_idle = tl.load(table + _IS_IDLE)
    brings = (is_idle == 0) & (tl.load(table + _HAS_FAILED) == 0)
    num_later = tl.where(brings, tl.minimum(most, credit // _LATER_PARTS), 0)
    others = num_experts - num_slots
    used_by_slots = used.to(tl.int64) * num_slots
    beyond = recent.to(tl.int64) * num_experts - used_by_slots
    is_lost = 8 * beyond <= used.to(tl.int64) * tl.minimum(num_slots, others)
    is_lost |= beyond * beyond <= used_by_slots * others * _LATER_VARIANCES
    decides = steps == _LATER_STEPS
    # what threads write, others have read by then
    tl.debug_barrier()
    tl.store(table + _CREDIT, credit - num_later * _LATER_PARTS)
    tl.store(table + _NUM_STEPS, tl.where(decides, 0, steps))
    tl.store(table + _NUM_USED, tl.where(decides, used - used // _LATER_FADES, used))
    tl.store(table + _NUM_RECENT, tl.where(decides, recent - recent // _LATER_FADES, recent))
    tl.store(table + _IS_IDLE, tl.where(decides, tl.where(is_lost, 1, 0), is_idle))
    return num_later


@triton.jit
def _use(  # type: ignore[no-untyped-def]
    chosen, table, shares, later, slot_of_pair, rest_of_pair, cores_of_pair, first_of_pair,
    num_steps, num_pairs, num_slots, num_experts,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, IS_STEP: tl.constexpr, IS_DIVIDED: tl.constexpr,
    BRINGS_LATER: tl.constexpr, MOST_POLLS: tl.constexpr,
):  # fmt: skip
    """One program: take the experts that steps chose into the table, by ``expert_table.use``.

    A step that brings experts for later first waits for the ones that the last step brought.
    Everything is held by place in the order of use. Experts and slots are exchanged among threads
    through the table itself; a barrier is where one reads what another wrote.
    """
    if BRINGS_LATER:
        _await_copies(table, later, MOST_POLLS)
    lists = table + _COUNTERS
    missed_list = lists + 2 * num_experts
    slot_list = lists + 3 * num_experts
    freed_list = lists + 4 * num_experts
    i = tl.arange(0, EXPERTS)
    inside = i < num_experts
    order = tl.load(lists + i, mask=inside, other=-2)
    slots = tl.load(lists + num_experts + i, mask=inside, other=_NOBODY)
    counts = table.to(tl.pointer_type(tl.int64), bitcast=True)
    num_hits = tl.load(counts)
    num_copied = tl.load(counts + 1)
    num_in_place = tl.load(counts + 2)
    num_settled = tl.load(counts + 3)
    if IS_STEP:
        used = _find(chosen, order, num_pairs, PAIRS)
        before = tl.cumsum(used, 0)
        new_place = tl.where(used > 0, before - 1, tl.sum(used, 0) + i - before)
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
        new_place = tl.zeros([EXPERTS], dtype=tl.int32)
        for first in range(0, num_experts, 32):
            j = first + tl.arange(0, 32)
            is_expert = j < num_experts
            its_late = tl.load(missed_list + j, mask=is_expert, other=0).to(tl.int64) & 0xFFFFFFFF
            its_early = tl.load(slot_list + j, mask=is_expert, other=0).to(tl.int64) & 0xFFFFFFFF
            is_above = its_late[None, :] > late[:, None]
            is_same = its_late[None, :] == late[:, None]
            is_above_early = its_early[None, :] > early[:, None]
            is_first = (its_early[None, :] == early[:, None]) & (j[None, :] < i[:, None])
            comes = (is_above | (is_same & (is_above_early | is_first))) & is_expert[None, :]
            new_place += tl.sum(comes.to(tl.int32), 1)
    was_there = (slots >= 0).to(tl.int32)
    missed, idle = used * (1 - was_there), (1 - used) * was_there
    nth_missed, nth_idle = _count_both(missed, idle)
    num_read, num_there = tl.sum(used, 0), tl.sum(was_there, 0)
    by_cores = missed < 0
    is_split = by_cores
    is_later = by_cores
    num_chunks = 0
    num_later = 0
    if IS_DIVIDED:
        num_missed = tl.sum(missed, 0)
        share = tl.load(shares + num_missed)
        num_by_cores = share & 0xFFFF
        num_chunks = share >> 16
        has_split = (num_chunks > 0).to(tl.int32)
        first_by_cores = num_missed - num_by_cores
        by_cores = (missed > 0) & (nth_missed >= first_by_cores)
        is_split = (missed > 0) & (nth_missed == first_by_cores - 1) & (num_chunks > 0)
        num_read -= num_by_cores + has_split
        tl.store(counts + _BY_CORES, tl.load(counts + _BY_CORES) + num_by_cores)
        tl.store(counts + _SPLIT, tl.load(counts + _SPLIT) + has_split)
        tl.store(counts + _SPLIT_CHUNKS, tl.load(counts + _SPLIT_CHUNKS) + num_chunks)
        tl.store(table + _SPLIT_EXPERT, tl.sum(tl.where(is_split, order, 0), 0))
    tl.store(table + _NUM_CHUNKS, num_chunks)
    is_read = (used > 0) & (by_cores == 0) & (is_split == 0)
    num_idle = num_slots - tl.minimum(num_read, num_slots)
    if BRINGS_LATER:  # the first of those that the link does not bring now, without a gap
        num_others = num_by_cores + has_split
        num_recent = tl.sum(tl.where(i < num_slots, used, 0), 0)
        most = tl.minimum(num_others, num_idle)
        num_later = _count_later(table, most, tl.sum(used, 0), num_recent, num_slots, num_experts)
        first_later = num_missed - num_others
        is_later = (missed > 0) & (nth_missed >= first_later)
        is_later = is_later & (nth_missed < first_later + num_later)
        num_idle -= num_later
    stays = (idle > 0) & (nth_idle < num_idle)
    if IS_STEP:
        num_here = tl.sum(used * was_there, 0)
        has_slot = (was_there > 0) | (num_here + nth_missed < num_slots)
        has_slot = (is_read & has_slot) | is_later | stays
    else:
        has_slot = (is_read & (new_place < num_slots)) | stays
    comes = has_slot.to(tl.int32) * (1 - was_there)
    leaves = was_there * (1 - has_slot.to(tl.int32))
    num_come, num_leaving = tl.sum(comes, 0), tl.sum(leaves, 0)
    if IS_STEP:  # the first of those missed come, and the last of the idle ones leave
        nth_come, nth_leaving = nth_missed, nth_idle - num_idle
    else:
        nth_come, nth_leaving = _count_both(comes, leaves)
    if num_leaving > 0:
        tl.store(freed_list + nth_leaving, slots, mask=leaves > 0)
        tl.debug_barrier()
        freed = tl.load(freed_list + nth_come, mask=(comes > 0) & (nth_come < num_leaving), other=0)
        slots = tl.where((comes > 0) & (nth_come < num_leaving), freed, slots)
    else:  # all that are read are read by now, and only what threads hold themselves is written
        tl.debug_barrier()
    fresh = num_there + nth_come - num_leaving
    slots = tl.where((comes > 0) & (nth_come >= num_leaving), fresh, slots)
    slots = tl.where(has_slot, slots, _NOBODY)
    tl.store(lists + new_place, order, mask=inside)
    tl.store(lists + num_experts + new_place, slots, mask=inside)
    tl.store(missed_list + nth_come, order, mask=comes > 0)
    tl.store(slot_list + nth_come, slots, mask=comes > 0)
    num_come -= num_later  # they are the last ones
    tl.store(table + _NUM_MISSED, num_come)
    if BRINGS_LATER:
        # whoever copies reads the list once the bell has rung, and the word behind its last copy
        sequence = tl.load(table + _SEQUENCE) + tl.where(num_later > 0, 1, 0)
        tl.store(table + _SEQUENCE, sequence)
        tl.store(later + _LIST_COUNT, num_later)
        tl.store(later + _LIST_SEQUENCE, sequence)
        listed = later + _LIST_PAIRS + 2 * (nth_come - num_come)
        tl.store(listed, order, mask=is_later)
        tl.store(listed + 1, slots, mask=is_later)
        tl.store(counts + _LATER, tl.load(counts + _LATER) + num_later)
    if IS_STEP:
        tl.store(counts, num_hits + num_here)
        tl.store(counts + 1, num_copied + num_come)
        tl.store(counts + 2, num_in_place + num_read - num_here - num_come)
        is_here = has_slot & (is_later == 0)
        place = tl.where(is_split, num_slots, tl.where(is_here, slots, num_experts))
        for first in range(0, num_pairs, PAIRS):
            p = first + tl.arange(0, PAIRS)
            is_pair = p < num_pairs
            pair = tl.load(chosen + p, mask=is_pair, other=-1).to(tl.int32)
            is_same = order[:, None] == pair[None, :]
            of_pair = tl.sum(tl.where(is_same, place[:, None], 0), 0)
            tl.store(slot_of_pair + p, of_pair, mask=is_pair)
            rest = tl.where(of_pair == num_experts, pair, num_experts)
            if IS_DIVIDED:
                is_its = tl.max((is_same & by_cores[:, None]).to(tl.int32), 0) > 0
                rest = tl.where(is_its, num_experts, rest)
                chunks = tl.max((is_same & is_split[:, None]).to(tl.int32), 0) * num_chunks
                of_part = pair.to(tl.int64) + (1 + chunks.to(tl.int64)) * num_experts
                of_cores = tl.where(is_its, pair.to(tl.int64), _NOBODY)
                of_cores = tl.where(chunks > 0, of_part, of_cores)
                tl.store(cores_of_pair + p, of_cores, mask=is_pair)
                tl.store(first_of_pair + p, chunks * _CHUNK_COLUMNS, mask=is_pair)
            tl.store(rest_of_pair + p, rest, mask=is_pair)
    else:
        tl.store(counts + 3, num_settled + num_come)


@triton.jit(do_not_specialize=["job"])
def _use_and_hand_over(  # type: ignore[no-untyped-def]
    chosen, table, shares, later, slot_of_pair, rest_of_pair, first_of_pair,
    tokens, factors, tokens_there, cores_of_pair, factors_there, words, arrived, job,
    num_values, num_pairs, num_slots, num_experts,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    BRINGS_LATER: tl.constexpr, MOST_POLLS: tl.constexpr,
):  # fmt: skip
    """Take a step's experts into the table by one program, while others hand tokens over; ring.

    The cores begin before anything is copied.
    """
    copier = tl.program_id(0) - 1
    if copier < 0:
        _use(
            chosen, table, shares, later, slot_of_pair, rest_of_pair, cores_of_pair, first_of_pair,
            1, num_pairs, num_slots, num_experts, EXPERTS, PAIRS, True, True,
            BRINGS_LATER, MOST_POLLS,
        )  # fmt: skip
    else:
        num_copiers = tl.num_programs(0) - 1
        copy_share(tokens, tokens_there, num_values, copier, num_copiers, BLOCK)
        copy_share(factors, factors_there, num_pairs, copier, num_copiers, BLOCK)
    ring(words, arrived, job)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    source, target, num_bytes, missed_list, slot_list, num_missed,
    WORD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a part of the listed experts, by words of SIZE bytes, a share of it by each program."""
    size = tl.multiple_of((num_bytes // SIZE).to(tl.int32), SIZE)
    num_blocks = tl.cdiv(size, BLOCK)
    for unit in range(tl.program_id(0), num_missed * num_blocks, tl.num_programs(0)):
        nth = unit // num_blocks
        at = (unit - nth * num_blocks) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(missed_list + nth).to(tl.int64)
        slot = tl.load(slot_list + nth).to(tl.int64)
        first = (source + expert * num_bytes).to(tl.pointer_type(WORD)) + at
        own = (target + slot * num_bytes).to(tl.pointer_type(WORD)) + at
        words = tl.load(tl.multiple_of(first, SIZE * SIZE), mask=at < size)
        tl.store(tl.multiple_of(own, SIZE * SIZE), words, mask=at < size)


@triton.jit
def _copy_rest(  # type: ignore[no-untyped-def]
    source, target, num_runs, run_bytes, first, WORD: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy what lies behind ``first`` bytes of each run, by words, a share by each program."""
    run_words = (run_bytes // SIZE).to(tl.int32)
    words = ((run_bytes - first) // SIZE).to(tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_runs * words, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        run = at // words
        place = run * run_words + (first // SIZE).to(tl.int32) + (at - run * words)
        is_inside = run < num_runs
        found = tl.load(source.to(tl.pointer_type(WORD)) + place, mask=is_inside)
        tl.store(target.to(tl.pointer_type(WORD)) + place, found, mask=is_inside)


@triton.jit
def _copy_missed(  # type: ignore[no-untyped-def]
    table, addresses, num_parts, slot_of_pair, order, starts, num_pairs, num_slots, num_experts,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, IS_STEP: tl.constexpr,
):  # fmt: skip
    """Copy the experts that the table lists into their slots, a share of them by each program.

    Of an expert that is split, the rest that the cores do not multiply goes behind the slots. In a
    step, one program a slot lists its pairs besides, as ``pairs.sort_pairs`` does.
    """
    program = tl.program_id(0)
    if IS_STEP:  # noqa: SIM102 (a constant, apart from what is computed)
        if program < num_experts:
            list_pairs(slot_of_pair, order, starts, program, num_pairs, num_experts, PAIRS)
    num_missed = tl.load(table + _NUM_MISSED)
    num_chunks = 0
    if IS_STEP:
        num_chunks = tl.load(table + _NUM_CHUNKS)
    if num_missed + num_chunks == 0:
        return
    missed_list = table + _COUNTERS + 2 * num_experts
    slot_list = missed_list + num_experts
    for part in range(0, num_parts):
        source = tl.load(addresses + _COLUMNS * part)
        target = tl.load(addresses + _COLUMNS * part + 1)
        num_bytes = tl.load(addresses + _COLUMNS * part + 2)
        if num_bytes % 16 == 0:  # 16 bytes a thread: parts begin on boundaries
            _copy(source, target, num_bytes, missed_list, slot_list, num_missed, tl.int32, 4, BLOCK)
        else:
            _copy(source, target, num_bytes, missed_list, slot_list, num_missed, tl.int8, 1, BLOCK)
        if num_chunks > 0:
            num_runs = tl.load(addresses + _COLUMNS * part + 3)
            first = num_chunks * tl.load(addresses + _COLUMNS * part + 4)
            num_runs = tl.maximum(num_runs, 1).to(tl.int32)
            run_bytes = num_bytes // num_runs
            expert = tl.load(table + _SPLIT_EXPERT).to(tl.int64)
            whole = source + expert * num_bytes
            rest = target + tl.cast(num_slots, tl.int64) * num_bytes
            if (num_bytes | run_bytes | first) % 4 == 0:
                _copy_rest(whole, rest, num_runs, run_bytes, first, tl.int32, 4, BLOCK)
            else:
                _copy_rest(whole, rest, num_runs, run_bytes, first, tl.int8, 1, BLOCK)


def address_parts(sources: Iterable[torch.Tensor], slots: Iterable[torch.Tensor]) -> torch.Tensor:
    """Say where the parts of experts and of slots lie: int64 of [parts, 5] on the slots' device.

    ``sources`` are [experts, ...], ``slots`` [slots, ...]; addresses, and bytes of one expert. The
    ``Runs`` behind them say that none lies by inner columns.
    """
    pairs = list(zip(sources, slots, strict=True))
    rows = [[of.data_ptr(), to.data_ptr(), to[0].nbytes, *Runs()] for of, to in pairs]
    return torch.tensor(rows, dtype=torch.int64, device=pairs[0][1].device)


SlotPairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The slot of each pair, the pairs by slot, and where each slot's begin among them. Then come the
expert of each pair that has no slot, and the first inner column of each that the cores do not
multiply. The last is set if experts are divided."""


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
    assert chosen.is_contiguous(), "rows of pairs lie one after another"
    _use[(1,)](
        chosen, table, table, table, *outputs, num_steps, num_pairs, num_slots, num_experts,
        **_sizes(num_experts, num_pairs), IS_STEP=is_step, IS_DIVIDED=False, BRINGS_LATER=False,
        MOST_POLLS=0, num_warps=4,
    )  # fmt: skip


def _sizes(num_experts: int, num_pairs: int) -> dict[str, int]:
    return {
        "EXPERTS": max(16, triton.next_power_of_2(num_experts)),
        "PAIRS": min(PAIRS, triton.next_power_of_2(num_pairs)),
    }


def _describe(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
    divided: Sequence[torch.Tensor],
) -> SlotPairs:
    of_pairs = (chosen.new_empty(chosen.numel(), dtype=torch.int32) for _ in range(4))
    slot_of_pair, order, rest, first = of_pairs
    return slot_of_pair, order, chosen.new_empty(num_experts + 1, dtype=torch.int32), rest, first


# That it changes table and slots is not declared: torch would copy them around the operator. What
# reads slots takes what this returns, and all of a session runs on one stream. What another stream
# copies into slots for later no compiled code sees change: the table gives these slots to no pair
# before its program has waited for the copies, and it is behind that program that slots are read.
@declare(
    "read_slots",
    "(Tensor chosen, Tensor table, Tensor addresses, int num_slots, int num_experts, "
    "Tensor[] divided) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _describe,
)
def _read(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
    divided: Sequence[torch.Tensor],
) -> SlotPairs:
    num_pairs = chosen.numel()
    made = _describe(chosen, table, addresses, num_slots, num_experts, divided)
    slot_of_pair, order, starts, rest, first = made
    chosen = chosen.contiguous()
    if divided:
        task, shares, later, tokens, factors = divided

        def launch(memory: Sequence[torch.Tensor], bell: tasks.Bell) -> None:
            num_values = tokens.numel()
            _use_and_hand_over[(1 + count_programs(num_values),)](
                chosen, table, shares, later if len(later) else table, slot_of_pair, rest, first,
                tokens.contiguous(), factors.contiguous(), *memory, *bell,
                num_values, num_pairs, num_slots, num_experts,
                **_sizes(num_experts, num_pairs), BLOCK=COPIED, BRINGS_LATER=len(later) > 0,
                MOST_POLLS=MOST_POLLS, num_warps=4,
            )  # fmt: skip

        tasks.find(task).begin_by(factors.shape, launch)
    else:
        outputs = slot_of_pair, rest, table, table
        _launch_use(table, chosen[None], num_slots, num_experts, outputs, is_step=True)
    _copy_missed[(max(COPY_PROGRAMS, num_experts),)](
        table, addresses, len(addresses), slot_of_pair, order, starts,
        num_pairs, num_slots, num_experts,
        PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK=BLOCK,
        IS_STEP=True,
        num_warps=8,
    )  # fmt: skip
    return made


def read_slots(
    chosen: torch.Tensor,
    table: torch.Tensor,
    addresses: torch.Tensor,
    num_slots: int,
    num_experts: int,
    divided: Sequence[torch.Tensor] = (),
) -> SlotPairs:
    """Take the experts that a step's pairs chose, [pairs], into slots; copy those missed.

    ``table`` is the memory of a ``Table`` of so many slots. Pairs whose expert has no slot have
    ``num_experts`` as their slot; among the experts of pairs without, those that have one have it.
    ``divided`` has the host's cores begin to multiply some of those missed, which then have neither
    slot nor expert. It is the task's number, the table's shares, its list of experts brought for
    later, which may be empty, tokens and the weights of their pairs. If the cores multiply a part
    of an expert, the slot behind the table's has the rest of it.
    """
    return _read(chosen, table, addresses, num_slots, num_experts, list(divided))


@triton.jit
def _pick_rows(  # type: ignore[no-untyped-def]
    slots, rows, slot_of_pair, chosen, out, places, num_slots, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy a part of a pair's row from its slot or, if it has none, from all experts' rows."""
    pair = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_of_pair + pair)
    has_slot = slot < num_slots
    own = tl.load(slots + slot.to(tl.int64) * size + at, mask=(at < size) & has_slot, other=0.0)
    expert = tl.load(chosen + pair).to(tl.int64)
    others = tl.load(rows + expert * size + at, mask=(at < size) & (has_slot == 0), other=0.0)
    tl.store(out + pair * size + at, tl.where(has_slot, own, others), mask=at < size)
    if tl.program_id(1) == 0:
        tl.store(places + pair, pair)


def _describe_rows(
    slots: torch.Tensor, rows: torch.Tensor, slot_of_pair: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        slots.new_empty(chosen.numel(), slots.shape[1]),
        chosen.new_empty(chosen.numel(), dtype=torch.int64),
    )


# To torch.compile one operator: whatever it joined would be rounded otherwise than in layers whose
# experts are resident, which look rows up in one table.
@declare(
    "pick_rows",
    "(Tensor slots, Tensor rows, Tensor slot_of_pair, Tensor chosen) -> (Tensor, Tensor)",
    _describe_rows,
)
def pick_rows(
    slots: torch.Tensor, rows: torch.Tensor, slot_of_pair: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each pair's row, of its slot or of all experts' rows, and their places: [pairs].

    ``slots`` are [slots, size], ``rows`` [experts, size]. ``slot_of_pair`` and ``chosen`` are
    [pairs]: the slot, which may be beyond the last, and the expert. One launch: torch's
    operators are seven, which took 20 us a call on an H200.
    """
    out, places = _describe_rows(slots, rows, slot_of_pair, chosen)
    size = slots.shape[1]
    _pick_rows[(chosen.numel(), triton.cdiv(size, BLOCK))](
        slots, rows, slot_of_pair, chosen.contiguous(), out, places, len(slots), size, BLOCK=BLOCK
    )
    return out, places


def settle(table: Table, chosen: torch.Tensor, addresses: torch.Tensor) -> None:
    """Take the experts that a prompt's last tokens chose, [tokens, pairs], and copy them.

    No later copy may be under way.
    """
    memory = table.memory
    outputs = memory, memory, memory, memory
    _launch_use(memory, chosen, table.num_slots, table.num_experts, outputs, is_step=False)
    copy_listed(table, addresses)


def copy_listed(table: Table, addresses: torch.Tensor) -> None:
    """Copy the experts that a table lists into the slots that it lists, whole."""
    memory = table.memory
    _copy_missed[(COPY_PROGRAMS,)](
        memory, addresses, len(addresses), memory, memory, memory, 0, table.num_slots,
        table.num_experts,
        PAIRS=16,
        BLOCK=BLOCK,
        IS_STEP=False,
        num_warps=8,
    )  # fmt: skip
