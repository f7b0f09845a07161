"""Which experts of a layer are in GPU memory: a table on the device, and what steps do to it.

Here in plain torch, for the CPU; ``table_kernels`` does the same on a GPU.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from offplan.capabilities.cached_experts import (
    LATER_FADES,
    LATER_PARTS,
    LATER_STEPS,
    MOST_LATER,
    brings_later,
)
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import TABLE_COUNTERS, TABLE_LISTS

NOTED_TOKENS = 64
"""Tokens of a prompt, the last ones of each sequence, that count as if they had been steps."""
NOBODY = -1
"""Stands for an expert where a prompt has no token."""
HITS, COPIED, IN_PLACE, FROM_PROMPT, BY_CORES, SPLIT, SPLIT_CHUNKS, LATER = range(8)
"""Counters of 8 bytes. Of steps they count the experts that were there, that were copied over the
link and that were read in place; of prompts, those copied. Of the host's cores they count the
experts multiplied, those multiplied in part, and the chunks of inner columns of that part. Last
come the experts that the link brought for later."""
NUM_MISSED, SPLIT_EXPERT, NUM_CHUNKS = 16, 17, 18
"""Numbers of 4 bytes: experts to be copied, the expert that the cores multiply in part, and its
chunks of inner columns, 0 for none."""
QUOTA, CREDIT, NUM_STEPS, NUM_USED, NUM_RECENT, IS_IDLE = range(19, 25)
"""Numbers of 4 bytes by which experts are brought for later: LATER_PARTS of an expert that a step
may bring, and that are left. Then come steps since the layer decided, the experts that it has
counted as used, and how many of them were among those used last. The last number is 1 while it
brings none."""
SEQUENCE, DONE, HAS_FAILED = range(25, 28)
"""Numbers of 4 bytes: of the last list of experts brought for later, and of the last one of which
all copies are done. Whoever copies writes DONE. HAS_FAILED is 1 once a wait for it was given up."""
LIST_COUNT, LIST_SEQUENCE, LIST_FAILED, LIST_PAIRS = 0, 1, 2, 4
"""Numbers of a list of experts brought for later, as ``LaterList`` of the host's cores has them."""
LIST_NUMBERS = LIST_PAIRS + 2 * MOST_LATER
COPIES_AT_ONCE = True
"""True if later copies are made as soon as the cores have begun, on the CPU; else they are made
when the layer looks up again, or another pass comes. Both are as early and as late as can be."""
ORDER, SLOTS, MISSED, MISSED_SLOTS, FREED = range(TABLE_LISTS)
"""Lists of a number for each expert. They are experts by their last use, the latest first, and the
slots that these have, or NOBODY. Then come experts to be copied, their slots, and room for a
kernel."""


class Table(NamedTuple):
    """Views of a layer's table, int32 on the device."""

    memory: torch.Tensor
    """All of it, [TABLE_LISTS x experts + TABLE_COUNTERS]."""
    num_slots: int
    num_experts: int
    shares: torch.Tensor | None = None
    """Experts that the host's cores multiply of so many that a step misses, int32 of [experts + 1]
    (``list_shares``); None if they multiply none."""
    later: torch.Tensor | None = None
    """The list of experts that the link brings for later, int32 of [LIST_NUMBERS] on the host, as
    the device sees it; None if it brings none."""

    @property
    def counts(self) -> torch.Tensor:
        """The counters, int64 of [8]."""
        return self.memory[:NUM_MISSED].view(torch.int64)

    def number(self, which: int) -> torch.Tensor:
        """A number, int32 of [1]."""
        return self.memory[which : which + 1]

    def list_of(self, which: int) -> torch.Tensor:
        """A list, int32 of [experts]."""
        begin = TABLE_COUNTERS + which * self.num_experts
        return self.memory[begin : begin + self.num_experts]

    def empty(self) -> None:
        """Say that no expert was used, and that none is there; queued on the current stream.

        No copy may be under way. That a wait was given up is not forgotten.
        """
        indices = torch.arange(self.num_experts, dtype=torch.int32, device=self.memory.device)
        self.number(NUM_MISSED).zero_()
        self.memory[CREDIT:HAS_FAILED].zero_()
        self.list_of(ORDER).copy_(indices)
        self.list_of(SLOTS).fill_(NOBODY)


class Runs(NamedTuple):
    """The layout of an expert's part by inner columns: the same of each in one run or several."""

    number: int = 0
    """Runs of an expert; 0 if the part does not lie so, and is copied whole."""
    chunk_bytes: int = 0
    """Bytes of CHUNK_COLUMNS inner columns in each run."""


class Used(NamedTuple):
    """The places of a step's pairs, each [pairs]."""

    slot: torch.Tensor
    """The slot of each, int32; ``num_experts`` where its expert has none."""
    by_cores: torch.Tensor
    """Expert of each pair that the host's cores multiply, int64; NOBODY if they multiply nothing.
    If they multiply a part of it, ``num_experts`` x (1 + its chunks) more."""
    first_column: torch.Tensor
    """The first of its inner columns that the cores do not multiply, int32; 0 for all but parts."""


def use(table: Table, chosen: torch.Tensor, *, is_step: bool) -> Used:
    """Take the experts that steps chose, [steps, pairs], one step after another; NOBODY is none.

    The experts of a step move to the front together and keep the order that they had. The host's
    cores multiply as many of the missed experts as ``shares`` says, the last ones in the order that
    was. These have no slot in this step. Of the one before them they may multiply a part: the rest
    of it is to be copied behind the slots, for this step alone. The others are brought, in the
    order, while there are slots that no expert of the step has: in place of those used longest ago.
    Slots that are then left go to the first of the split expert and the cores', as many as
    ``_count_later`` allows: later steps find them there. A prompt's last steps leave the first
    experts in the order there, of those that it used or that were there. Lists those to be copied
    and their slots, and those to be copied later. ``is_step`` counts what the step, the only one,
    found; else a prompt's are counted. Returns what the pairs of the last step find. CPU only: it
    waits for what it finds.

    Source: an expert's uses, the last step's first, are its place in the order: the steps' own
    stable partitions, one after another, sort by them.
    """
    num_experts, num_slots = table.num_experts, table.num_slots
    order = table.list_of(ORDER).long()
    used = torch.zeros(len(chosen), num_experts + 1, dtype=torch.bool)
    used.scatter_(1, chosen.long() % (num_experts + 1), value=True)  # NOBODY is the last one
    used = used[:, order]
    places = torch.arange(num_experts)
    for step in used:  # stable: both the chosen and the others keep the order that they had
        places = places[(~step[places]).sort(stable=True).indices]
    new_places = torch.empty_like(places)
    new_places[places] = torch.arange(num_experts)
    slots = table.list_of(SLOTS).clone()
    was_there, is_used = slots >= 0, used.any(0)
    missed = is_used & ~was_there
    num_missed, nth_missed = int(missed.sum()), missed.cumsum(0) - 1
    share = 0 if table.shares is None or not is_step else int(table.shares[num_missed])
    num_by_cores, num_chunks = share & 0xFFFF, share >> 16
    first_by_cores = num_missed - num_by_cores
    by_cores = missed & (nth_missed >= first_by_cores)
    is_split = missed & (nth_missed == first_by_cores - 1) & (num_chunks > 0)
    is_read = is_used & ~by_cores & ~is_split
    idle = was_there & ~is_used
    if is_step:  # what is there is not given up by the step that uses it
        places_read = torch.where(was_there, 0, (is_used & was_there).sum() + nth_missed)
    else:
        places_read = new_places
    num_left = num_slots - min(int(is_read.sum()), num_slots)
    num_later, num_brought = 0, first_by_cores - (num_chunks > 0)
    if is_step and table.later is not None:
        assert not is_pending(table), "a lookup waits for the copies of the one before"
        num_recent = int(is_used[:num_slots].sum())
        most = min(num_missed - num_brought, num_left)
        num_later = _count_later(table, most, int(is_used.sum()), num_recent)
    is_later = missed & (nth_missed >= num_brought) & (nth_missed < num_brought + num_later)
    num_idle = num_left - num_later
    has_slot = (is_read & (places_read < num_slots)) | (idle & (idle.cumsum(0) <= num_idle))
    has_slot |= is_later
    comes, leaves = has_slot & ~was_there, was_there & ~has_slot
    num_come, num_there = int(comes.sum()), int(was_there.sum())
    fresh = torch.arange(num_there, num_there + num_come, dtype=slots.dtype)
    slots[comes] = torch.cat([slots[leaves], fresh])[:num_come]
    slots[~has_slot] = NOBODY
    table.list_of(MISSED)[:num_come] = order[comes].int()
    table.list_of(MISSED_SLOTS)[:num_come] = slots[comes]
    num_come -= num_later  # they are the last ones
    table.number(NUM_MISSED).fill_(num_come)
    if is_step and table.later is not None:
        _list_later(table, order[is_later], slots[is_later])
    table.number(NUM_CHUNKS).fill_(num_chunks)
    table.number(SPLIT_EXPERT)[:] = order[is_split].sum()
    table.list_of(ORDER)[new_places] = order.int()
    table.list_of(SLOTS)[new_places] = slots
    if is_step:
        table.counts[HITS] += (is_used & was_there).sum()
        table.counts[COPIED] += num_come
        table.counts[IN_PLACE] += (is_read & ~has_slot).sum()
        table.counts[BY_CORES] += num_by_cores
        table.counts[SPLIT] += num_chunks > 0
        table.counts[SPLIT_CHUNKS] += num_chunks
        table.counts[LATER] += num_later
    else:
        table.counts[FROM_PROMPT] += num_come
    slot_of = torch.full((num_experts,), num_experts, dtype=torch.int32)
    is_here = has_slot & ~is_later
    slot_of[order[is_here]] = slots[is_here]
    slot_of[order[is_split]] = num_slots
    expert_of = torch.full((num_experts,), NOBODY, dtype=torch.int64)
    expert_of[order[by_cores]] = order[by_cores]
    expert_of[order[is_split]] = order[is_split] + (1 + num_chunks) * num_experts
    first_column = torch.zeros(num_experts, dtype=torch.int32)
    first_column[order[is_split]] = num_chunks * CHUNK_COLUMNS
    last = chosen[-1].long()
    return Used(slot_of[last], expert_of[last], first_column[last])


def _count_later(table: Table, most: int, num_used: int, num_recent: int) -> int:
    """Count the experts that a step brings for later, ``most`` at most, by what the layer may.

    The step used ``num_used`` experts, of which ``num_recent`` were among those used last. Integers
    alone decide, so that the same history brings the same experts.
    """
    quota, credit, steps, used, recent, is_idle = table.memory[QUOTA : IS_IDLE + 1].tolist()
    credit = min(credit + quota, LATER_PARTS * MOST_LATER)
    num_later = 0 if is_idle else min(most, credit // LATER_PARTS)
    credit -= num_later * LATER_PARTS
    steps, used, recent = steps + 1, used + num_used, recent + num_recent
    if steps == LATER_STEPS:
        is_idle = int(not brings_later(table.num_slots, table.num_experts, used, recent))
        steps, used, recent = 0, used - used // LATER_FADES, recent - recent // LATER_FADES
    numbers = torch.tensor([credit, steps, used, recent, is_idle], dtype=torch.int32)
    table.memory[CREDIT : IS_IDLE + 1] = numbers
    return num_later


def _list_later(table: Table, experts: torch.Tensor, slots: torch.Tensor) -> None:
    """List experts and their slots for whoever copies them, by the next number if there are any."""
    later = table.later
    assert later is not None
    table.number(SEQUENCE).add_(bool(len(experts)))
    later[LIST_COUNT], later[LIST_SEQUENCE] = len(experts), table.number(SEQUENCE)[0]
    pairs = torch.stack([experts, slots], 1).flatten()
    later[LIST_PAIRS : LIST_PAIRS + len(pairs)] = pairs.to(later.dtype)


def is_pending(table: Table) -> bool:
    """Return True if copies that were listed for later are not made yet; waits for the device."""
    return bool(table.number(SEQUENCE) != table.number(DONE))


def copy_later(
    table: Table, sources: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor]
) -> None:
    """Copy the experts listed for later into their slots, unless that is done. CPU only."""
    if table.later is None or not is_pending(table):
        return
    num_pairs = int(table.later[LIST_COUNT])
    pairs = table.later[LIST_PAIRS : LIST_PAIRS + 2 * num_pairs].view(num_pairs, 2).long()
    for name, slot in slots.items():
        slot[pairs[:, 1]] = sources[name][pairs[:, 0]]
    table.number(DONE).copy_(table.number(SEQUENCE))


def copy_missed(
    table: Table,
    sources: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
    runs: Mapping[str, Runs] | None = None,
) -> None:
    """Copy the experts that ``use`` listed into their slots, part by part. CPU only.

    ``sources`` are [experts, ...], ``slots`` [slots, ...]. Of an expert that is split what the
    cores do not multiply is copied, as its ``runs`` lie.
    """
    num_missed = int(table.number(NUM_MISSED))
    experts = table.list_of(MISSED)[:num_missed].long()
    into = table.list_of(MISSED_SLOTS)[:num_missed].long()
    for name, slot in slots.items():
        slot[into] = sources[name][experts]
    if num_chunks := int(table.number(NUM_CHUNKS)):
        expert = int(table.number(SPLIT_EXPERT))
        for name, slot in slots.items():
            of = (runs or {}).get(name, Runs())
            views = (part.view(-1).view(torch.uint8) for part in (sources[name][expert], slot[-1]))
            whole, own = (view.view(max(1, of.number), -1) for view in views)
            own[:, num_chunks * of.chunk_bytes :] = whole[:, num_chunks * of.chunk_bytes :]


def clear_cut(
    table: Table, slots: dict[str, torch.Tensor], runs: Mapping[str, Runs] | None
) -> None:
    """Clear the columns of the last slot that the cores multiply of the split expert. CPU only.

    An expert of before left them there. The step weighs them by zero, which does not hide infinite
    values.
    """
    num_chunks = int(table.number(NUM_CHUNKS))
    for name, slot in slots.items():
        of = (runs or {}).get(name, Runs())
        own = slot[-1].view(-1).view(torch.uint8).view(max(1, of.number), -1)
        own[:, : num_chunks * of.chunk_bytes] = 0
