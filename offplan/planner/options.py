"""Options of a rule beyond its group pattern: each way is an option, and this is its one place.

An option is a segment class and a pair of backends. ``KeepsExperts`` is an option with numbers of
its own. An option lists itself, says what it takes and costs, writes the rule, and names the steps
by which its numbers change. The search is about options and knows no number of any.

Numbers that are bought with memory are rungs of a ladder. Every layer of the rule climbs as many as
the plan leaves bytes for, the first layers one more. Any other number is a field of an option,
listed once for each value that may be best.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.backends import Backend
from offplan.checkpoint.model import Experts
from offplan.choices import Store
from offplan.costs.cores import CoresUse
from offplan.costs.kept_experts import brought_bytes, find_experts, keeping_ps, left_bytes
from offplan.costs.missed import Missed
from offplan.costs.parts import PartsMemory, divide_ps, find_parts_memory, span_seconds
from offplan.costs.timeline import to_ps
from offplan.errors import PlanError
from offplan.expert_slots import (
    BOUNDARY_BYTES,
    ExpertSlots,
    check_parts,
    find_expert_slots,
    find_inner,
)
from offplan.forms.form import Part
from offplan.kernel_sizes import MAX_PAIRS
from offplan.placement import PART_SLOTS, build_slab
from offplan.plan import Rule, Workload
from offplan.planner.classes import SegmentClass, expert_class, segment_classes
from offplan.planner.space import Space
from offplan.refusals import why_not_by_cores

SHARES = tuple(number / 16 for number in range(1, 17))
"""Values of ``host_share`` tried; 0 is an option without the host's cores."""
NUM_PARTS = (2, 4, 8, 16, 32)
"""Values of ``parts`` tried: each part has launches of its own, and more parts spare little."""
MOST_LONGER = 4
"""Groups are tried where a prompt of the context has at most so many times the planned tokens.

The parts of a longer prompt would cross more often. Source: predictions. DeepSeek-V2-Lite in 3.82
GiB of an H100 was planned for 1,500 tokens. A prompt of 8,176 would take 2.4 s in groups of 1,500,
and 0.63 s without parts.
"""
MOST_GROUPS = 16
"""Groups of chunks, at most, that values of ``tokens_at_once`` divide a prompt into: they are the
prompt's tokens, and powers of two below."""
LEAST_AT_ONCE = 1024
"""Fewer tokens at once, over all sequences, are not tried: each group has the parts cross again.

Source: DeepSeek-V2-Lite in 4.5 GiB of an H200, planned for prompts of 512 tokens. A prompt of 3,968
took 4.4 s in groups of 512, and 1.1 s without parts (``benchmarks/results/parts-h200.json``).
"""


class Ladder(NamedTuple):
    """The costs of a layer by its number of rungs; an array of each for many layers."""

    rung_bytes: Any
    """GPU memory of each rung."""
    fixed_bytes: Any
    """GPU memory that comes with the first."""
    none_ps: Any
    """Picoseconds that a decode step would take without any rung, beyond the option's content."""
    times_ps: NDArray[np.int64]
    """Picoseconds beyond the option's content, [5, rungs + 1]. They are of a prompt's reading and
    its compute, a step's reading and its compute, and the latter in a step that copies. None at 0
    rungs."""
    asked: Any
    """The rungs that each layer must have; 0 for as many as memory is left for."""


class Parts(NamedTuple):
    """The costs of a layer whose prompts stream what a rule takes part by part.

    An array of each for many layers.
    """

    num_parts: Any
    gpu_bytes: NDArray[np.int64]
    """GPU memory of the slots, and of what chunks keep meanwhile, [settings]: all layers share the
    largest."""
    spared_bytes: NDArray[np.int64]
    """Bytes that prompts spare if no layer has its experts whole, [settings]."""
    copy_ps: Any
    """Picoseconds of the copy of one part."""
    moved_ps: NDArray[np.int64]
    """Part of a prompt's compute in the layer that its parts take, [settings]."""
    part_ps: NDArray[np.int64]
    """Picoseconds that a group of chunks computes with each part, [settings]."""
    num_groups: NDArray[np.int64]
    """Groups of chunks for which the parts cross, [settings]."""


@dataclass(frozen=True)
class Option:
    """The weights that a rule takes of its pattern's layers, and how they get there."""

    segment_class: SegmentClass
    prefill: Backend
    decode: Backend

    @property
    def order_key(self) -> tuple[object, ...]:
        """Among equally good plans those of fewer segments come first, then in this order."""
        segments, values = self.segment_class.segments, self.numbers(1, 0).values()
        told = tuple(-1.0 if value is None else float(value) for value in values)
        return len(segments), segments, self.prefill.name, self.decode.name, told

    @property
    def climbs(self) -> bool:
        """True if it has ladders: decode is then priced by rungs, and not by content."""
        return False

    @property
    def fills_ring(self) -> bool:
        """True if a prompt streams layers whole, so that decode may find them in the ring."""
        return self.prefill.streams

    def numbers(self, rungs: int, more: int) -> Mapping[str, Any]:
        """Return the rule's own keys, at so many rungs, of which ``more`` layers have one more."""
        return {}

    def ladder(self, space: Space, kind: int) -> Ladder | None:
        """Return the ladder of a kind of layer; None if it has none."""
        return None

    def parts(self, space: Space, kind: int) -> Parts | None:
        """Return the parts of a kind of layer; None if prompts stream it whole, or not."""
        return None

    def rule(self, group_size: int, num_in_group: int, rungs: int = 1, more: int = 0) -> Rule:
        """Return the rule of a plan with this pattern."""
        return Rule(
            cpu_offload_params=self.segment_class.segments,
            group_size=group_size,
            num_in_group=num_in_group,
            prefill=self.prefill,
            decode=self.decode,
            **self.numbers(rungs, more),
        )


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The routed experts of a space's layers, which rules may keep on the GPU one by one."""

    space: Space
    segment_class: SegmentClass
    """They alone."""
    slots: tuple[ExpertSlots | None, ...]
    """Room for one expert of each kind of layer; None if a kind has none."""

    @classmethod
    def of(cls, space: Space) -> "RoutedExperts | None":
        """Find them; None if rules may keep none."""
        goal, stage = space.question.goal, space.stage
        if goal.cached_experts == "off" or stage.experts is None:
            return None
        if space.question.workload.batch * stage.experts.num_experts_per_token > MAX_PAIRS:
            return None
        segment_class = expert_class(stage)
        kinds = zip(space.layers, space.taken(segment_class), strict=True)
        way = Backend.UVA
        rule = Rule(group_size=1, num_in_group=1, prefill=way, decode=way, cached_experts=1)
        try:
            slots = tuple(
                find_expert_slots(stage, layer, 1, rule, units, 0) if units else None
                for layer, units in kinds
            )
        except PlanError:  # its bytes are not those of whole experts
            return None
        return cls(space, segment_class, slots) if any(slots) else None

    @property
    def most(self) -> int:
        """Experts that every layer which has any can keep."""
        return min(each.num_experts for each in self.slots if each is not None)

    @cached_property
    def inner(self) -> list[int]:
        """Inner columns of the experts of each kind of layer; 0 if they cannot be split."""
        units = (() if each is None else each.units for each in self.slots)
        return [find_inner(self.space.stage, of_kind) for of_kind in units]

    @cached_property
    def chosen(self) -> list[tuple[int, CoresUse]]:
        """Picoseconds that a step reads each kind of layer with no slots, all that it chooses.

        With what the host's cores would do with them.
        """
        at_use, found = self.space.at_use, []
        for slots in self.slots:
            units = () if slots is None else slots.units
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
    def climbs(self) -> bool:
        """A rung is an expert in a slot."""
        return True

    def numbers(self, rungs: int, more: int) -> Mapping[str, Any]:
        """Return the keys of kept experts."""
        return {
            "cached_experts": rungs,
            "cached_experts_more": more or None,
            "host_share": self.host_share,
            "split_expert": True if self.splits and rungs > 1 else None,
        }

    def ladder(self, space: Space, kind: int) -> Ladder | None:
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
        return Ladder(
            slots.expert_bytes,
            slots.table_bytes + BOUNDARY_BYTES * len(slots.units),
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


@dataclass(frozen=True)
class StreamsParts(Option):
    """Routed experts that prompts stream in parts: ``parts``."""

    num_parts: int
    memory: tuple[PartsMemory, ...]
    """Memory that prompts take at the experts in each of the space's settings."""
    tokens_at_once: int | None = None

    @property
    def order_key(self) -> tuple[object, ...]:
        """Of equally good ones that with most tokens at once comes first, as they are listed."""
        return *super().order_key[:-1], (self.num_parts,)

    @property
    def fills_ring(self) -> bool:
        """Parts have slots of their own, which the next part takes."""
        return False

    def numbers(self, rungs: int, more: int) -> Mapping[str, Any]:
        """Return the number of parts, and how much of a prompt meets one at once."""
        return {"parts": self.num_parts, "tokens_at_once": self.tokens_at_once}

    def parts(self, space: Space, kind: int) -> Parts | None:
        """Price the parts of a kind of layer."""
        units = space.taken(self.segment_class)[kind]
        if not units:
            return None
        rule, layer = self.rule(1, 1), space.kind_of.index(kind)
        first, *_ = build_slab((unit, rule) for unit in units).parts
        gpu_bytes, times = [], []
        for each, memory in zip(space.settings, self.memory, strict=True):
            num_chunks = len(each.prefill.shapes)
            at_once = rule.chunks_at_once(each.prefill_chunk)
            gpu_bytes.append(PART_SLOTS * first.slot_bytes + memory.of_group(at_once))
            num_groups = -(-num_chunks // (at_once or num_chunks))
            times.append(divide_ps(each.prefill, layer, self.num_parts, num_groups))
        return Parts(
            self.num_parts,
            np.array(gpu_bytes),
            np.array([each.routed_bytes for each in self.memory]),
            to_ps(span_seconds(space.machine, first)),
            np.array([each.moved_ps for each in times]),
            np.array([each.part_ps for each in times]),
            np.array([each.num_groups for each in times]),
        )


def _list_parts(space: Space, ways: Iterable[tuple[Backend, Backend]]) -> Iterator[StreamsParts]:
    """List the ways to stream the layers' experts in parts, as a question allows."""
    stage, goal = space.stage, space.question.goal
    if goal.parts == "off" or stage.experts is None:
        return
    experts, workload = expert_class(stage), space.question.workload
    chunks = [each.prefill_chunk for each in space.settings]
    memory = tuple(find_parts_memory(stage, workload, chunk) for chunk in chunks)
    for way in ways:
        if not way[0].streams or way[1].streams or way[1].is_served:
            continue
        if way[1].is_by_cores and not suits_cores(space, experts):
            continue
        for num_parts in NUM_PARTS:
            option = StreamsParts(experts, *way, num_parts, memory)
            with suppress(PlanError):  # it does not divide the experts
                for layer, units in zip(space.layers, space.taken(experts), strict=True):
                    check_parts(stage, layer, 1, option.rule(1, 1), units)
                yield option
                for tokens in _list_at_once(workload):
                    yield replace(option, tokens_at_once=tokens)


def _list_at_once(workload: Workload) -> Iterator[int]:
    """List the values of ``tokens_at_once`` that are tried, the largest first."""
    prompt_tokens, least = workload.prompt_tokens, LEAST_AT_ONCE / workload.batch
    if workload.context > MOST_LONGER * workload.batch * prompt_tokens:
        return
    if least <= prompt_tokens < workload.context:  # longer prompts than planned come in groups
        yield prompt_tokens
    tokens = 1 << (prompt_tokens - 1).bit_length()
    while (tokens := tokens // 2) * MOST_GROUPS >= prompt_tokens and tokens >= least:
        yield tokens


def backend_pairs(backends: Iterable[Backend], store: Store) -> list[tuple[Backend, Backend]]:
    """List the backends that a rule may have in prefill and in decode.

    Decode by the ring with a prompt that reads in place is not tried. A prompt never has fewer rows
    than a step. So reading never suits the prompt better if it is no faster than copying, as on
    every link measured so far.
    """
    known = [each for each in backends if store in each.stores]
    return [
        (prefill, decode)
        for prefill in known
        for decode in known
        if "prefill" in prefill.phases and "decode" in decode.phases
        if prefill.streams or not decode.streams
    ]


def suits_cores(space: Space, segment_class: SegmentClass) -> bool:
    """Return True if the host's cores have kernels for what a class takes, experts as a whole."""
    taken = space.taken(segment_class)
    has_matrices = any(u.part is Part.WEIGHT and len(u.shape) > 1 for u in chain(*taken))
    return has_matrices and not any(
        why_not_by_cores(space.stage, kind, units)
        for kind, units in zip(space.units, taken, strict=True)
    )


def list_options(space: Space) -> tuple[Option, ...]:
    """List what a rule may take and how, in order, as store and engine allow.

    Classes whose parameters are all empty are left out: a rule of one frees nothing.
    """
    takes_one = space.question.runner.takes_one_rule
    ways = backend_pairs(space.question.backends, space.machine.store)
    ways = [way for way in ways if not takes_one or way[0] is way[1]]
    # where so many experts are asked for, all that go are kept so
    kept_alone = isinstance(space.question.goal.cached_experts, int)
    found: list[Option] = []
    for each in segment_classes(space.stage):
        units = [*chain(*space.taken(each))]
        if any(u.nbytes for u in units) and not (kept_alone and any(u.is_expert for u in units)):
            options = (Option(each, *way) for way in ways)
            found += [o for o in options if not o.decode.is_by_cores or suits_cores(space, each)]
    if (experts := RoutedExperts.of(space)) is not None:
        for way in ways:
            keeps = KeepsExperts(experts.segment_class, *way, experts)
            if keeps.decode is Backend.UVA:
                found.append(keeps)
            elif keeps.decode.is_by_cores and suits_cores(space, keeps.segment_class):
                found += _best_shares(space, keeps)
    found += _list_parts(space, ways)
    return tuple(sorted(found, key=lambda option: option.order_key))


def _best_shares(space: Space, option: KeepsExperts) -> list[KeepsExperts]:
    """List an option with the shares that suit some number of kept experts best."""
    experts = option.experts
    kinds = [number for number, slots in enumerate(experts.slots) if slots]
    shared = [replace(option, host_share=share) for share in SHARES]
    if all(experts.inner[kind] for kind in kinds):
        shared += [replace(each, splits=True) for each in shared if each.host_share != 1]
    ladders = [each.ladder(space, kinds[0]) for each in shared]
    steps = np.array([ladder.times_ps[2:4, 1:].sum(axis=0) for ladder in ladders if ladder])
    return [shared[number] for number in np.unique(steps.argmin(axis=0))]


def number_steps(rule: Rule) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the steps of a rule's own numbers, and the keys that each changes."""
    if (parts := rule.parts) is not None:
        for number in (parts // 2, 2 * parts):
            yield f"parts {parts} -> {number}", {"parts": number}
        if (tokens := rule.tokens_at_once) is not None:
            for number in (tokens // 2, 2 * tokens):
                yield f"tokens_at_once {tokens} -> {number}", {"tokens_at_once": number}
            yield "without tokens_at_once", {"tokens_at_once": None}
        yield "without parts", {"parts": None, "tokens_at_once": None}
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
