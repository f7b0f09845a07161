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
HITS, COPIED, IN_PLACE, FROM_PROMPT = range(4)
"""Counters of 8 bytes: of steps the experts that were there, that were copied over the link and
that were read there in place; and those that prompts copied."""
NUM_USED, NUM_MISSED = 8, 9
"""Numbers of 4 bytes: experts that were ever used, which come first, and those to be copied."""
ORDER, SLOTS, MISSED, MISSED_SLOTS, FREED = range(LISTS)
"""Lists of a number for each expert: experts by their last use, the latest first; the slots that
the first of these have; experts to be copied and their slots; and room for a kernel."""


class Table(NamedTuple):
    """Views of a layer's table, int32 on the device."""

    memory: torch.Tensor
    """All of it, [LISTS x experts + COUNTERS]."""
    num_slots: int
    num_experts: int

    @property
    def counts(self) -> torch.Tensor:
        """The counters, int64 of [4]."""
        return self.memory[:NUM_USED].view(torch.int64)

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
        self.number(NUM_USED).zero_()
        self.number(NUM_MISSED).zero_()
        self.list_of(ORDER).copy_(indices)
        self.list_of(SLOTS).copy_(indices)


def use(table: Table, chosen: torch.Tensor, *, is_step: bool) -> torch.Tensor:
    """Take the experts that steps chose, [steps, pairs], one step after another; NOBODY is none.

    The experts of a step move to the front together and keep the order that they had; the first
    ``num_slots`` of those that were ever used are in slots. Lists those to be copied, and their
    slots. ``is_step`` counts what the step, the only one, found; else a prompt's are counted.
    Returns the slot of each pair of the last step, int32 of [pairs]; ``num_experts`` for experts
    that have none. CPU only: it waits for what it finds.

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
    is_used = used.any(0)
    was_used = torch.arange(num_experts) < table.number(NUM_USED)
    had_slot, has_slot = torch.arange(num_experts) < num_slots, ranks < num_slots
    was_there = had_slot & was_used
    slots = table.list_of(SLOTS).clone()
    slots[has_slot & ~had_slot] = slots[had_slot & ~has_slot]  # one leaves for each that comes
    missed = is_used & has_slot & ~was_there
    num_missed = int(missed.sum())
    table.list_of(MISSED)[:num_missed] = order[missed].int()
    table.list_of(MISSED_SLOTS)[:num_missed] = slots[missed]
    table.number(NUM_MISSED).fill_(num_missed)
    table.number(NUM_USED).add_((is_used & ~was_used).sum().int())
    table.list_of(ORDER)[ranks] = order.int()
    table.list_of(SLOTS)[ranks[has_slot]] = slots[has_slot]
    if is_step:
        table.counts[HITS] += (is_used & was_there).sum()
        table.counts[COPIED] += num_missed
        table.counts[IN_PLACE] += (is_used & ~has_slot).sum()
    else:
        table.counts[FROM_PROMPT] += num_missed
    slot_of = torch.full((num_experts,), num_experts, dtype=torch.int32)
    slot_of[order[has_slot]] = slots[has_slot]
    return slot_of[chosen[-1].long()]


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
