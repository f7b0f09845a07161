"""Cached experts: options whose layers keep some of their routed experts on the GPU one by one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from offplan.backends import Backend
from offplan.capabilities.cached_experts import BOUNDARY_BYTES, LATER_PARTS, ExpertSlots
from offplan.costs.cached_experts import (
    Missed,
    brought_bytes,
    keeping_ps,
    later_parts,
    left_bytes,
)
from offplan.costs.cores import CoresUse
from offplan.costs.predict import PricedStage, price_stage
from offplan.errors import PlanError
from offplan.held.unit import Unit
from offplan.kernel_sizes import MAX_PAIRS
from offplan.plan import Offload, Rule
from offplan.planner.classes import SegmentClass, expert_class
from offplan.planner.option import CostCurve, Option, Steps, Ways
from offplan.planner.question import Question
from offplan.planner.space import Space, find_room
from offplan.routed_experts import count_inner, require_experts

ROUNDS = 4
"""Times that a step and what its link may bring for later are found from each other."""


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
    def chosen(self) -> list[tuple[int, list[CoresUse]]]:
        """Picoseconds that a step reads each kind of layer with no slots, all that it chooses.

        With what the host's cores would do with them, in each pass of decode.
        """
        return [
            (
                self.space.step_read_ps((unit, Backend.UVA) for unit in units),
                [p.at_use.cores((unit, Backend.HOST) for unit in units) for p in self.space.steps],
            )
            for units in self.units
        ]


@dataclass(frozen=True)
class KeepsExperts(Option):
    """Routed experts of which each layer keeps some on the GPU: ``cached_experts``."""

    experts: RoutedExperts
    later: int = 0
    """``ExpertSlots.later`` of the rule."""

    @property
    def has_curve(self) -> bool:
        """An entry of the cache is an expert in a slot."""
        return True

    def numbers(self, cache_sizes: int, more: int) -> Mapping[str, Any]:
        """Return the keys of kept experts."""
        return {
            "cached_experts": cache_sizes,
            "cached_experts_more": more or None,
            "later_experts": self.later / LATER_PARTS if self.later else None,
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
        if self.decode.is_by_cores:
            none_ps = sum(self.step_ps(space, kind, 0))
        for kept in range(1, self.experts.most + 1):
            of = self._slots(kind, kept)
            left = 0 if streams else left_bytes(of, experts, prompt)
            read, waiting = self.step_ps(space, kind, kept)
            waiting += keeping_ps(of, experts, space.machine, step, streams=False)
            times[:, kept] = (
                space.reading_ps(left, self.prefill),
                keeping_ps(of, experts, space.machine, prompt, streams=streams),
                read,
                waiting,
                waiting,
            )
        return CostCurve(
            slots.expert_bytes,
            slots.table_bytes + BOUNDARY_BYTES * len(slots.unit_bytes),
            none_ps,
            times,
            asked if isinstance(asked, int) else 0,
        )

    def _slots(self, kind: int, num_slots: int) -> ExpertSlots:
        one, by_cores = self.experts.slots[kind], self.decode.is_by_cores
        assert one is not None
        inner = self.experts.inner[kind] if by_cores else 0
        return replace(one, num_slots=num_slots, by_cores=by_cores, inner=inner, later=self.later)

    def step_ps(self, space: Space, kind: int, num_slots: int) -> tuple[int, int]:
        """Picoseconds of a step's reading with so many slots, and of what it waits beyond that."""
        slots, reading, waiting = self._slots(kind, num_slots), 0.0, 0.0
        for each, chosen in zip(space.steps, self.experts.chosen[kind][1], strict=True):
            missed = Missed.predict(slots, each.at_use, chosen)
            layer_ps = each.compute.layer_ps[space.first_of[kind]]
            waiting += each.share * missed.waiting_ps(space.machine, layer_ps)
            reading += each.share * space.reading_ps(brought_bytes(slots, missed.found))
        return round(reading), round(waiting)

    def with_later(self, space: Space) -> "KeepsExperts":
        """Return it with what the link may bring for later of what the cores multiply.

        The link's idle time is that of a step of which nothing else crosses the link, with as many
        slots as the budget has room for beside all other weights. ``settle_later`` finds a plan's
        own. Where such a step is no shorter, as without a routing profile, the link brings nothing.
        """
        if space.stage.routing is None:
            return self
        kinds = [kind for kind in space.kind_of if self.experts.slots[kind]]
        sizes = {kind: slots.expert_bytes for kind, slots in enumerate(self.experts.slots) if slots}
        bytes_of_each = sum(sizes[kind] for kind in kinds)
        missing = -(-find_room(space, space.question.budget).missing_bytes // bytes_of_each)
        kept = min(self.experts.most, max(1, self.experts.most - missing))

        def step_ps(option: KeepsExperts) -> tuple[int, int]:
            each = {kind: option.step_ps(space, kind, kept) for kind in sizes}
            return sum(each[kind][0] for kind in kinds), sum(each[kind][1] for kind in kinds)

        option, found = self, (without := step_ps(self))
        for _ in range(ROUNDS):
            idle_ps = space.decode.resident_ps + found[1]
            option = replace(option, later=later_parts(idle_ps, bytes_of_each, space.machine))
            found = step_ps(option)
        return option if sum(found) < sum(without) else self


def list_options(space: Space, ways: Ways) -> Iterator[KeepsExperts]:
    """List the ways to keep experts of the layers, as a question allows."""
    if (experts := RoutedExperts.of(space)) is None:
        return
    for way in ways:
        keeps = KeepsExperts(experts.segment_class, *way, experts)
        if keeps.decode is Backend.UVA:
            yield keeps
        elif keeps.decode.is_by_cores and space.suits(keeps.segment_class, keeps.decode):
            yield keeps.with_later(space)


def list_steps(rule: Rule) -> Steps:
    """Yield the steps of the numbers of kept experts, and the keys that each changes."""
    if (kept := rule.cached_experts) is None:
        return
    for number in (kept - 1, kept + 1):
        yield f"cached_experts {kept} -> {number}", {"cached_experts": number}
    if rule.later_experts is not None:
        yield "without later_experts", {"later_experts": None}
    keys = "cached_experts", "cached_experts_more", "later_experts"
    yield "without cached_experts", dict.fromkeys(keys)


def settle_later(question: Question, offload: Offload) -> Offload:
    """Return a decision whose rules bring for later what the link is idle for in its own step.

    A step that finds more is shorter, and leaves the link less time: both follow from each other.
    Rules bring nothing where the step is no shorter for it, as without a routing profile.
    """
    without = _with_later(offload, 0)
    if question.stage.routing is None or not any(rule.divides_missed for rule in offload.rules):
        return without
    for _ in range(ROUNDS):
        parts = _count_parts(question, offload)
        before, offload = offload, _with_later(offload, parts)
        if offload == before:
            break
    else:
        offload = _with_later(offload, min(parts, _count_parts(question, offload)))
    return min(without, offload, key=partial(_step_ps, question))  # of equal ones the first


def _step_ps(question: Question, offload: Offload) -> float:
    """Picoseconds of a step without drafts, through all stages."""
    return sum(float(times.decode.step_ps) for *_, times in _price(question, offload))


def _price(question: Question, offload: Offload) -> Iterator[PricedStage]:
    """Price each stage without drafts: the link is idle least in a step."""
    offload = offload.model_copy(update={"draft": None})
    for stage in question.hold(offload):
        yield price_stage(stage, question.planned_machine, question.workload, offload)


def _count_parts(question: Question, offload: Offload) -> int:
    """Count the LATER_PARTS of an expert of each layer that the link has time for in a step."""
    machine, found = question.planned_machine, []
    for placement, *_, times in _price(question, offload):
        slots = placement.caches_of(ExpertSlots).values()
        expert_bytes = sum(each.expert_bytes for each in slots if each.by_cores)
        if expert_bytes:
            idle_ps = float(times.decode.step_ps) - times.decode.awaited_ps
            found.append(later_parts(idle_ps, expert_bytes, machine))
    return min(found, default=0)


def _with_later(offload: Offload, parts: int) -> Offload:
    later = {"later_experts": parts / LATER_PARTS if parts else None}
    rules = tuple(
        rule.model_copy(update=later) if rule.divides_missed else rule for rule in offload.rules
    )
    return offload.model_copy(update={"rules": rules})
