"""Every plan of the stated space, priced by its schedule: written without the planner's help.

Only what the space consists of is the planner's: segment classes, backends, rings.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import Literal

from offplan.costs.activations import activation_bytes
from offplan.costs.compute import ModelCompute
from offplan.costs.memory import kv_cache_bytes, overhead_bytes
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import to_seconds
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.errors import PlanError
from offplan.held.runner import OWN_RUNTIME
from offplan.held.unit import group_units
from offplan.placement import Phase, Placement, place
from offplan.plan import Backend, Offload, Rule
from offplan.planner.classes import SegmentClass, segment_classes
from offplan.planner.options import backend_pairs
from offplan.planner.question import Question
from offplan.planner.space import PREFETCH_STEPS
from tests.costs.builders import rule
from tests.costs.exact import run_request

PLACES: tuple[Literal["device", "host"], ...] = ("device", "host")


@dataclass(frozen=True)
class Priced:
    """A plan that fits, and its seconds as predictions have them."""

    offload: Offload
    prefill_s: float
    decode_s: float
    objective_s: float


@dataclass(frozen=True)
class BruteForce:
    """All plans of a question; the chunks to try are the caller's."""

    question: Question
    chunks: tuple[int, ...]

    @cached_property
    def singles(self) -> list[Priced]:
        """Plans of no rule and of one that fit."""
        return list(self._price(self._all_rules()))

    @cached_property
    def pairs(self) -> list[Priced]:
        """Plans of two rules that fit."""
        return list(self._price(self._all_pairs()))

    def _all_rules(self) -> Iterator[tuple[Rule, ...]]:
        """Every rule, without a thought for which could be good."""
        yield ()
        stage = self.question.stage
        for each in segment_classes(stage):
            for group, backends in product(_groups(len(stage.layers)), _backend_pairs()):
                yield (_make(each, group, backends),)
            taken = 0
            for layer in stage.layers:
                for unit in filter(each.takes, group_units(layer)):
                    taken += unit.nbytes
                    for backend in OWN_RUNTIME.backends:
                        if not backend.streams:
                            yield (
                                Rule(
                                    cpu_offload_params=each.segments,
                                    max_bytes=taken,
                                    prefill=backend,
                                    decode=backend,
                                ),
                            )

    def _all_pairs(self) -> Iterator[tuple[Rule, ...]]:
        """Every two rules whose classes have no parameter in common."""
        layers = self.question.stage.layers
        taken = {
            each: {unit for layer in layers for unit in filter(each.takes, group_units(layer))}
            for each in segment_classes(self.question.stage)
        }
        for classes in combinations(taken, 2):
            if taken[classes[0]] & taken[classes[1]]:
                continue
            for groups in product(*map(self._spread_groups, classes)):
                for backends in product(_backend_pairs(), repeat=2):
                    yield tuple(map(_make, classes, groups, backends))

    def _spread_groups(self, segment_class: SegmentClass) -> list[tuple[int, int]]:
        """Of patterns that take as many layers of each kind, those with the smallest groups."""
        having = [
            layer.key if any(map(segment_class.takes, group_units(layer))) else None
            for layer in self.question.stage.layers
        ]
        found: dict[tuple[str, ...], tuple[int, int]] = {}
        for group in _groups(len(having)):
            selects = rule(group=group).selects_layer
            keys = [key for index, key in enumerate(having) if key and selects(index)]
            found.setdefault(tuple(sorted(keys)), group)
        found.pop((), None)
        return list(found.values())

    def _price(self, combined: Iterable[tuple[Rule, ...]]) -> Iterator[Priced]:
        """Price rules in every setting and with every ring, where they fit."""
        question = self.question
        for rules, embeddings in product(combined, PLACES):
            if any(question.store not in b.stores for r in rules for b in (r.prefill, r.decode)):
                continue
            offload = Offload(
                prefetch_step=1,
                prefill_chunk=self.chunks[0],
                embeddings=embeddings,
                store=question.store,
                rules=rules,
            )
            try:
                placement = place(question.stage, offload)
            except PlanError:  # a pattern that takes nothing, a tied embedding
                continue
            turns = max(len(placement.spans(phase)) for phase in Phase)
            for step in PREFETCH_STEPS[: max(1, turns)]:
                placed = replace(placement, num_slots=min(step, turns))
                if not self._has_room(placed):
                    continue
                weight_bytes = placed.resident_bytes + placed.ring_bytes
                for chunk, fixed_bytes in self._fixed_bytes.items():
                    if weight_bytes + fixed_bytes <= question.budget.gpu_memory:
                        said = {"prefetch_step": step, "prefill_chunk": chunk}
                        yield self._time(offload.model_copy(update=said), placed)

    def _has_room(self, placement: Placement) -> bool:
        room = self.question.budget.host_memory
        on_host = self.question.store == "host"
        needed = placement.offloaded_bytes if on_host else placement.slab_bytes
        return room is None or needed <= room

    def _time(self, offload: Offload, placement: Placement) -> Priced:
        prompt, step = self._passes[offload.prefill_chunk]
        stage, machine = self.question.stage, self.question.planned_machine
        prompt_ps, step_ps = run_request(placement, stage, machine, prompt, step)
        request_ps = prompt_ps + self.question.workload.num_steps * step_ps
        return Priced(offload, *map(to_seconds, (prompt_ps, step_ps, request_ps)))

    @cached_property
    def _fixed_bytes(self) -> dict[int, int]:
        """What each chunk takes of the GPU beside weights and ring."""
        question = self.question
        stage, workload = question.stage, question.workload
        kept = overhead_bytes(question.planned_machine, question.budget)
        return {
            size: kept
            + kv_cache_bytes(stage, workload, size)
            + activation_bytes(stage, workload, size)
            for size in self.chunks
        }

    @cached_property
    def _passes(self) -> dict[int, tuple[PassCompute, PassCompute]]:
        question = self.question
        compute = ModelCompute(question.stage, question.planned_machine)
        step = compute.price(decode_shape(question.workload))
        return {
            size: (compute.price(*prefill_shapes(question.workload, size)), step)
            for size in self.chunks
        }


def _backend_pairs() -> list[tuple[Backend, Backend]]:
    return backend_pairs(OWN_RUNTIME.backends, "host")


@cache
def _groups(num_layers: int) -> list[tuple[int, int]]:
    """Every ``group_size`` and ``num_in_group``, the smallest groups first."""
    return [(size, n) for size in range(1, num_layers + 1) for n in range(1, size + 1)]


def _make(each: SegmentClass, group: tuple[int, int], backends: tuple[Backend, Backend]) -> Rule:
    return rule(*each.segments, group=group, prefill=backends[0], decode=backends[1])
