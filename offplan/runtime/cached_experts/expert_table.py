"""Which experts of a layer are in GPU memory: a table on the device, and what steps do to it.

Here in plain torch, for the CPU; ``table_kernels`` does the same on a GPU.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import TABLE_COUNTERS, TABLE_LISTS

NOTED_TOKENS = 64
"""Tokens of a prompt, the last ones of each sequence, that count as if they had been steps."""
NOBODY = -1
"""Stands for an expert where a prompt has no token."""
HITS, COPIED, IN_PLACE, FROM_PROMPT, BY_CORES, SPLIT, SPLIT_CHUNKS = range(7)
"""Counters of 8 bytes. Of steps they count the experts that were there, that were copied over the
link and that were read in place; of prompts, those copied. Of the host's cores they count the
experts multiplied, those multiplied in part, and the chunks of inner columns of that part."""
NUM_MISSED, SPLIT_EXPERT, NUM_CHUNKS = 16, 17, 18
"""Numbers of 4 bytes: experts to be copied, the expert that the cores multiply in part, and its
chunks of inner columns, 0 for none."""
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
        """Say that no expert was used, and that none is there; queued on the current stream."""
        indices = torch.arange(self.num_experts, dtype=torch.int32, device=self.memory.device)
        self.number(NUM_MISSED).zero_()
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
    was. These take no slot. Of the one before them they may multiply a part: the rest of it is to
    be copied behind the slots, for this step alone. The others are brought, in the order, while
    there are slots that no expert of the step has: in place of those used longest ago. A prompt's
    last steps leave the first experts in the order there, of those that it used or that were there.
    Lists those to be copied, and their slots. ``is_step`` counts what the step, the only one,
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
    num_idle = num_slots - min(int(is_read.sum()), num_slots)
    has_slot = (is_read & (places_read < num_slots)) | (idle & (idle.cumsum(0) <= num_idle))
    comes, leaves = has_slot & ~was_there, was_there & ~has_slot
    num_come, num_there = int(comes.sum()), int(was_there.sum())
    fresh = torch.arange(num_there, num_there + num_come, dtype=slots.dtype)
    slots[comes] = torch.cat([slots[leaves], fresh])[:num_come]
    slots[~has_slot] = NOBODY
    table.list_of(MISSED)[:num_come] = order[comes].int()
    table.list_of(MISSED_SLOTS)[:num_come] = slots[comes]
    table.number(NUM_MISSED).fill_(num_come)
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
    else:
        table.counts[FROM_PROMPT] += num_come
    slot_of = torch.full((num_experts,), num_experts, dtype=torch.int32)
    slot_of[order[has_slot]] = slots[has_slot]
    slot_of[order[is_split]] = num_slots
    expert_of = torch.full((num_experts,), NOBODY, dtype=torch.int64)
    expert_of[order[by_cores]] = order[by_cores]
    expert_of[order[is_split]] = order[is_split] + (1 + num_chunks) * num_experts
    first_column = torch.zeros(num_experts, dtype=torch.int32)
    first_column[order[is_split]] = num_chunks * CHUNK_COLUMNS
    last = chosen[-1].long()
    return Used(slot_of[last], expert_of[last], first_column[last])


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
