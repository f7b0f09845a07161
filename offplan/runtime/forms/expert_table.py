"""Which experts of a layer are in GPU memory: a table on the device, and what steps do to it.

Here in plain torch, for the CPU; ``table_kernels`` does the same on a GPU.
"""

from typing import NamedTuple

import torch

from offplan.expert_slots import COUNTERS, LISTS

NOTED_TOKENS = 64
"""Tokens of a prompt, the last ones of each sequence, that count as if they had been steps."""
NOBODY = -1
"""Stands for an expert where a prompt has no token."""
HITS, COPIED, IN_PLACE, FROM_PROMPT, BY_CORES = range(5)
"""Counters of 8 bytes: of steps the experts that were there, that were copied over the link and
that were read there in place; those that prompts copied; those that the host's cores multiplied."""
NUM_MISSED = 10
"""A number of 4 bytes: experts to be copied."""
ORDER, SLOTS, MISSED, MISSED_SLOTS, FREED = range(LISTS)
"""Lists of a number for each expert: experts by their last use, the latest first; the slots that
these have, or NOBODY; experts to be copied and their slots; and room for a kernel."""


class Table(NamedTuple):
    """Views of a layer's table, int32 on the device."""

    memory: torch.Tensor
    """All of it, [LISTS x experts + COUNTERS]."""
    num_slots: int
    num_experts: int
    shares: torch.Tensor | None = None
    """Of so many experts that a step misses, how many the host's cores multiply, int32 of
    [experts + 1]; None where they multiply none."""

    @property
    def counts(self) -> torch.Tensor:
        """The counters, int64 of [5]."""
        return self.memory[:NUM_MISSED].view(torch.int64)

    def number(self, which: int) -> torch.Tensor:
        """A number, int32 of [1]."""
        return self.memory[which : which + 1]

    def list_of(self, which: int) -> torch.Tensor:
        """A list, int32 of [experts]."""
        begin = COUNTERS + which * self.num_experts
        return self.memory[begin : begin + self.num_experts]

    def empty(self) -> None:
        """Say that no expert was used, and that none is there; queued on the current stream."""
        indices = torch.arange(self.num_experts, dtype=torch.int32, device=self.memory.device)
        self.number(NUM_MISSED).zero_()
        self.list_of(ORDER).copy_(indices)
        self.list_of(SLOTS).fill_(NOBODY)


def use(table: Table, chosen: torch.Tensor, *, is_step: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the experts that steps chose, [steps, pairs], one step after another; NOBODY is none.

    The experts of a step move to the front together and keep the order that they had. Of those that
    a step misses the host's cores multiply as many as ``shares`` says, the last ones in the order
    that was; these take no slot. The others are brought, in the order, while there are slots that
    no expert of the step has: in place of those used longest ago. A prompt's last steps leave the
    first experts in the order there, of those that it used or that were there. Lists those to be
    copied, and their slots. ``is_step`` counts what the step, the only one, found; else a prompt's
    are counted. Returns the slot of each pair of the last step, int32 of [pairs], ``num_experts``
    for experts that have none; and the expert of each pair that the cores multiply, int64, NOBODY
    for others. CPU only: it waits for what it finds.

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
    ranks = torch.empty_like(places)
    ranks[places] = torch.arange(num_experts)
    slots = table.list_of(SLOTS).clone()
    was_there, is_used = slots >= 0, used.any(0)
    missed = is_used & ~was_there
    num_missed, nth_missed = int(missed.sum()), missed.cumsum(0) - 1
    num_by_cores = 0 if table.shares is None or not is_step else int(table.shares[num_missed])
    by_cores = missed & (nth_missed >= num_missed - num_by_cores)
    is_read = is_used & ~by_cores
    idle = was_there & ~is_used
    if is_step:  # what is there is not given up by the step that uses it
        ranks_read = torch.where(was_there, 0, (is_used & was_there).sum() + nth_missed)
    else:
        ranks_read = ranks
    num_idle = num_slots - min(int(is_read.sum()), num_slots)
    has_slot = (is_read & (ranks_read < num_slots)) | (idle & (idle.cumsum(0) <= num_idle))
    comes, leaves = has_slot & ~was_there, was_there & ~has_slot
    num_come, num_there = int(comes.sum()), int(was_there.sum())
    fresh = torch.arange(num_there, num_there + num_come, dtype=slots.dtype)
    slots[comes] = torch.cat([slots[leaves], fresh])[:num_come]
    slots[~has_slot] = NOBODY
    table.list_of(MISSED)[:num_come] = order[comes].int()
    table.list_of(MISSED_SLOTS)[:num_come] = slots[comes]
    table.number(NUM_MISSED).fill_(num_come)
    table.list_of(ORDER)[ranks] = order.int()
    table.list_of(SLOTS)[ranks] = slots
    if is_step:
        table.counts[HITS] += (is_used & was_there).sum()
        table.counts[COPIED] += num_come
        table.counts[IN_PLACE] += (is_read & ~has_slot).sum()
        table.counts[BY_CORES] += num_by_cores
    else:
        table.counts[FROM_PROMPT] += num_come
    slot_of = torch.full((num_experts,), num_experts, dtype=torch.int32)
    slot_of[order[has_slot]] = slots[has_slot]
    expert_of = torch.full((num_experts,), NOBODY, dtype=torch.int64)
    expert_of[order[by_cores]] = order[by_cores]
    last = chosen[-1].long()
    return slot_of[last], expert_of[last]


def copy_missed(
    table: Table, sources: dict[str, torch.Tensor], slots: dict[str, torch.Tensor]
) -> None:
    """Copy the experts that ``use`` listed into their slots, part by part. CPU only.

    ``sources`` are [experts, ...], ``slots`` [slots, ...].
    """
    num_missed = int(table.number(NUM_MISSED))
    experts = table.list_of(MISSED)[:num_missed].long()
    into = table.list_of(MISSED_SLOTS)[:num_missed].long()
    for name, slot in slots.items():
        slot[into] = sources[name][experts]
