"""Cached experts: options whose layers keep some of their routed experts on the GPU one by one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from offplan.backends import Backend
from offplan.capabilities.cached_experts import BOUNDARY_BYTES, ExpertSlots
from offplan.checkpoint.model import Experts
from offplan.costs.cached_experts import (
    Missed,
    brought_bytes,
    find_experts,
    keeping_ps,
    left_bytes,
)
from offplan.costs.cores import CoresUse
from offplan.errors import PlanError
from offplan.held.unit import Unit
from offplan.kernel_sizes import MAX_PAIRS
from offplan.plan import Rule
from offplan.planner.classes import SegmentClass, expert_class
from offplan.planner.option import CostCurve, Option, Steps, Ways
from offplan.planner.space import Space
from offplan.routed_experts import count_inner, require_experts

SHARES = tuple(number / 16 for number in range(1, 17))
"""Values of ``host_share`` tried; 0 is an option without the host's cores."""


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The routed experts of a space's layers, which rules may keep on the GPU one by one."""

    space: Space
    segment_class: SegmentClass
    """They alone."""
    slots: tuple[ExpertSlots | None, ...]
    """Room for one expert of each kind of layer; None if a kind has none."""
    units: tuple[Sequence[Unit], ...]
    """The units of each kind's experts."""

    @classmethod
    def of(cls, space: Space) -> "RoutedExperts | None":
        """Find them; None if rules may keep none."""
        goal, stage = space.question.goal, space.stage
        if goal.cached_experts == "off" or stage.experts is None:
            return None
        if space.question.workload.batch * stage.experts.num_experts_per_token > MAX_PAIRS:
            return None
        segment_class = expert_class(stage)
        taken = tuple(space.taken(segment_class))
        way = Backend.UVA
        rule = Rule(group_size=1, num_in_group=1, prefill=way, decode=way, cached_experts=1)
        try:
            found = [
                require_experts(stage, layer, 1, rule, units) if units else None
                for layer, units in zip(space.layers, taken, strict=True)
            ]
        except PlanError:  # its bytes are not those of whole experts
            return None
        slots = tuple(
            None if each is None else ExpertSlots(1, each.num_experts, each.unit_bytes)
            for each in found
        )
        return cls(space, segment_class, slots, taken) if any(slots) else None

    @property
    def most(self) -> int:
        """Experts that every layer which has any can keep."""
        return min(each.num_experts for each in self.slots if each is not None)

    @cached_property
    def inner(self) -> list[int]:
        """Inner columns of the experts of each kind of layer; 0 if they cannot be split."""
        return [count_inner(self.space.stage, units) for units in self.units]

    @cached_property
    def chosen(self) -> list[tuple[int, CoresUse]]:
        """Picoseconds that a step reads each kind of layer with no slots, all that it chooses.

        With what the host's cores would do with them.
        """
        at_use, found = self.space.at_use, []
        for units in self.units:
            read_ps = at_use.read_ps([(unit, Backend.UVA) for unit in units], self.space.decode)
            found.append((read_ps, at_use.cores((unit, Backend.HOST) for unit in units)))
        return found


@dataclass(frozen=True)
class KeepsExperts(Option):
    """Routed experts of which each layer keeps some on the GPU: ``cached_experts``.

    With ``host_share`` the host's cores multiply that part of what a step misses; ``splits`` says
    whether of one expert they multiply a part.
    """

    experts: RoutedExperts
    host_share: float | None = None
    splits: bool = False

    @property
    def has_curve(self) -> bool:
        """An entry of the cache is an expert in a slot."""
        return True

    def numbers(self, cache_sizes: int, more: int) -> Mapping[str, Any]:
        """Return the keys of kept experts."""
        return {
            "cached_experts": cache_sizes,
            "cached_experts_more": more or None,
            "host_share": self.host_share,
            "split_expert": True if self.splits and cache_sizes > 1 else None,
        }

    def cost_curve(self, space: Space, kind: int) -> CostCurve | None:
        """Price each number of experts in slots."""
        slots, experts = self.experts.slots[kind], space.stage.experts
        if slots is None or experts is None:
            return None
        asked = space.question.goal.cached_experts
        prompt, step = space.settings[0].prefill.shapes, space.decode.shapes
        streams = self.prefill.streams
        times = np.zeros((5, self.experts.most + 1), dtype=np.int64)
        none_ps = self.experts.chosen[kind][0]
        inner = self.experts.inner[kind] if self.splits else 0
        if self.host_share:
            none = replace(slots, num_slots=0, host_share=self.host_share)
            none_ps = sum(self._step_ps(space, kind, none, experts)[:2])
        for kept in range(1, self.experts.most + 1):
            of = replace(slots, num_slots=kept, host_share=self.host_share or 0.0, inner=inner)
            left = 0 if streams else left_bytes(of, experts, prompt)
            read, *waiting = self._step_ps(space, kind, of, experts)
            keeping = keeping_ps(of, experts, space.machine, step, streams=False)
            times[:, kept] = (
                space.reading_ps(left, self.prefill),
                keeping_ps(of, experts, space.machine, prompt, streams=streams),
                read,
                *(keeping + each for each in waiting),
            )
        return CostCurve(
            slots.expert_bytes,
            slots.table_bytes + BOUNDARY_BYTES * len(slots.unit_bytes),
            none_ps,
            times,
            asked if isinstance(asked, int) else 0,
        )

    def _step_ps(
        self, space: Space, kind: int, slots: ExpertSlots, experts: Experts
    ) -> tuple[int, int, int]:
        """Picoseconds of a step's reading, and of its waiting if it copies nothing, and if it does.

        Waiting is what it takes beyond that reading.
        """
        found = find_experts(slots, experts, space.at_use.reuse, space.at_use.batch)
        missed = Missed(slots, found, self.experts.chosen[kind][1])
        layer_ps = space.decode.layer_ps[space.kind_of.index(kind)]
        alone, beside = (
            missed.waiting_ps(space.machine, layer_ps, copies=copies) for copies in (False, True)
        )
        return space.reading_ps(brought_bytes(slots, found)), alone, beside


def list_options(space: Space, ways: Ways) -> Iterator[KeepsExperts]:
    """List the ways to keep experts of the layers, as a question allows."""
    if (experts := RoutedExperts.of(space)) is None:
        return
    for way in ways:
        keeps = KeepsExperts(experts.segment_class, *way, experts)
        if keeps.decode is Backend.UVA:
            yield keeps
        elif keeps.decode.is_by_cores and space.suits(keeps.segment_class, keeps.decode):
            yield from _best_shares(space, keeps)


def _best_shares(space: Space, option: KeepsExperts) -> list[KeepsExperts]:
    """List an option with the shares that suit some number of kept experts best."""
    experts = option.experts
    kinds = [number for number, slots in enumerate(experts.slots) if slots]
    shared = [replace(option, host_share=share) for share in SHARES]
    if all(experts.inner[kind] for kind in kinds):
        shared += [replace(each, splits=True) for each in shared if each.host_share != 1]
    curves = [each.cost_curve(space, kinds[0]) for each in shared]
    steps = np.array([curve.times_ps[2:4, 1:].sum(axis=0) for curve in curves if curve])
    return [shared[number] for number in np.unique(steps.argmin(axis=0))]


def list_steps(rule: Rule) -> Steps:
    """Yield the steps of the numbers of kept experts, and the keys that each changes."""
    if (kept := rule.cached_experts) is None:
        return
    for number in (kept - 1, kept + 1):
        yield f"cached_experts {kept} -> {number}", {"cached_experts": number}
    if (share := rule.host_share) is not None:
        for other in (share - SHARES[0], share + SHARES[0]):
            splits = rule.split_expert if 0 < other < 1 else None
            yield (
                f"host_share {share:g} -> {other:g}",
                {"host_share": other, "split_expert": splits},
            )
        how = "without" if rule.split_expert else "with"
        yield f"{how} split_expert", {"split_expert": None if rule.split_expert else True}
    keys = "cached_experts", "cached_experts_more", "host_share", "split_expert"
    yield "without cached_experts", dict.fromkeys(keys)
