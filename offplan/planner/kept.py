"""Experts that rules keep one by one: what each number of them takes and costs, in arrays.

All layers of a rule keep as many experts as memory is left for, the first ones one more: a plan
that has these rules anyway is never slower for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offplan.costs.kept_experts import keeping_ps, left_bytes
from offplan.costs.link import use_bytes
from offplan.expert_slots import BOUNDARY_BYTES, ExpertSlots
from offplan.planner.space import Option, Space

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class KeptExperts:
    """What experts in slots take, by option, kind of layer and their number.

    The row after the last option, and that of an option that keeps none, has nothing but zeros.
    """

    space: Space

    @cached_property
    def keeps(self) -> NDArray[np.bool_]:
        """Whether rules of an option keep experts, [options + 1]."""
        return np.array([*(option.keeps for option in self.space.options), False])

    @cached_property
    def is_any(self) -> bool:
        """Whether any option's rules do."""
        return bool(self.keeps.any())

    @cached_property
    def num_experts(self) -> int:
        """Experts of a layer; 0 where none are kept."""
        found = (slots.num_experts for _, _, slots in self._slots)
        return min(found, default=0)

    @cached_property
    def _slots(self) -> list[tuple[int, int, ExpertSlots]]:
        """Option, kind and the slots of a layer."""
        return [
            (number, kind, slots)
            for number, option in enumerate(self.space.options)
            if option.keeps
            for kind, slots in enumerate(self.space.expert_slots[option.segment_class])
            if slots is not None
        ]

    @cached_property
    def expert_bytes(self) -> Ints:
        """Bytes of an expert, [options + 1, kinds]; 0 where a kind has none."""
        return self._of_kinds(lambda slots: slots.expert_bytes)

    @cached_property
    def fixed_bytes(self) -> Ints:
        """Bytes of a layer's table, and of boundaries at most, [options + 1, kinds]."""
        return self._of_kinds(lambda slots: slots.table_bytes + BOUNDARY_BYTES * len(slots.units))

    def _of_kinds(self, count: Callable[[ExpertSlots], int]) -> Ints:
        found = np.zeros((len(self.keeps), len(self.space.units)), dtype=np.int64)
        for number, kind, slots in self._slots:
            found[number, kind] = count(slots)
        return found

    @cached_property
    def times(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Picoseconds that kept experts add, [options + 1, kinds, number of experts].

        What a prompt reads, what its kernels take, and both of a decode step.
        """
        space, experts = self.space, self.space.stage.experts
        shape = (len(self.keeps), len(space.units), self.num_experts + 1)
        tables = np.zeros((4, *shape), dtype=np.int64)
        step, prompt = space.decode.shapes, space.settings[0].prefill.shapes
        for number, kind, slots in self._slots:
            option = space.options[number]
            assert experts is not None
            for kept in range(1, self.num_experts + 1):
                of = replace(slots, num_slots=kept)
                streams = option.prefill.streams
                left = 0 if streams else left_bytes(of, experts, prompt)
                tables[:, number, kind, kept] = (
                    space.reading_ps(left, option.prefill),
                    keeping_ps(of, experts, space.machine, prompt, streams=streams),
                    self._step_read_ps(option, slots, kept),
                    keeping_ps(of, experts, space.machine, step, streams=False),
                )
        return tables[0], tables[1], tables[2], tables[3]

    @cached_property
    def uncached_ps(self) -> Ints:
        """Picoseconds that a step reads of a layer's experts with none in slots."""
        found = np.zeros_like(self.expert_bytes)
        for number, kind, slots in self._slots:
            found[number, kind] = self._step_read_ps(self.space.options[number], slots, 0)
        return found

    def _step_read_ps(self, option: Option, slots: ExpertSlots, kept: int) -> int:
        space = self.space
        batch = space.question.workload.batch
        given = slots.units, space.stage.experts, batch, space.reuse, kept
        return space.reading_ps(use_bytes(option.decode, space.machine, *given), option.decode)

    def fill(self, option: Ints, takes: Ints, spare: Ints) -> Ints:
        """Spend spare bytes on slots; returns experts of each layer, [candidates, layers].

        ``takes`` is 1 for layers that the rule takes of which the option keeps experts. Where fewer
        bytes are spare than one expert of each layer takes, or than were asked for, all are 0.
        """
        kinds = np.array(self.space.kind_of)
        fixed = (takes * self.fixed_bytes[option][:, kinds]).sum(axis=1)
        largest = np.maximum(1, (takes * self.expert_bytes[option][:, kinds]).max(axis=1))
        num_layers = takes.sum(axis=1)
        total = np.minimum((spare - fixed) // largest, self.num_experts * num_layers)
        asked = self.space.question.goal.cached_experts
        if isinstance(asked, int):
            total = np.where(total >= asked * num_layers, asked * num_layers, 0)
        total = np.where(total >= num_layers, total, 0)
        each, more = np.divmod(total, np.maximum(1, num_layers))
        is_first = np.cumsum(takes, axis=1) <= more[:, None]
        slots: Ints = takes * (each[:, None] + is_first)
        return slots
