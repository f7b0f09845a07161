"""What rules take of a layer, priced once for all candidates that take the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from offplan.costs.timeline import to_ps
from offplan.placement import Phase, Unit, build_slab
from offplan.plan import Backend, Rule
from offplan.planner.patterns import Pattern
from offplan.planner.problem import Problem
from offplan.planner.segments import SegmentClass
from offplan.planner.steady import LayerPass, decode_ps, prefill_ps


class Choice(NamedTuple):
    """A rule as the search sees it."""

    segment_class: SegmentClass
    prefill: Backend
    decode: Backend
    pattern: Pattern

    def rule(self) -> Rule:
        """The rule as a plan says it."""
        return Rule(
            cpu_offload_params=self.segment_class.segments,
            group_size=self.pattern.group_size,
            num_in_group=self.pattern.num_in_group,
            prefill=self.prefill,
            decode=self.decode,
        )


class Part(NamedTuple):
    """What one rule takes of a layer, and how."""

    segment_class: SegmentClass
    prefill: Backend
    decode: Backend


class Content(NamedTuple):
    """What is offloaded of one layer."""

    unit_bytes: int
    slab_bytes: int
    prompt: tuple[LayerPass, ...]
    """In prefill, for each setting."""
    step: LayerPass
    kept_uva_ps: int
    """Read in place in decode when the ring keeps what prefill streamed."""


class Weighed(NamedTuple):
    """Memory of a candidate."""

    saved_bytes: int
    """Off the GPU, the ring's slots deducted."""
    host_bytes: int
    num_slots: int
    num_streamed: int
    """Layers that stream in the phase that streams most."""


@dataclass
class Pricer:
    """Weighs and prices candidates of one problem; remembers what layers of a kind cost."""

    problem: Problem
    _contents: dict[tuple[int, tuple[Part, ...]], Content] = field(default_factory=dict)

    def contents(self, choices: Sequence[Choice]) -> list[Content]:
        """What the rules take of each layer; the first that matches a parameter wins."""
        parts = [Part(*choice[:3]) for choice in choices]
        found = []
        for layer, kind in enumerate(self.problem.kind_of):
            key = tuple(
                part
                for part, choice in zip(parts, choices, strict=True)
                if choice.pattern.layers >> layer & 1
            )
            content = self._contents.get((kind, key))
            if content is None:
                content = self._contents[kind, key] = self._price(kind, key)
            found.append(content)
        return found

    def weigh(self, contents: Sequence[Content], prefetch_step: int) -> Weighed:
        """Add up memory."""
        spans = [(c.prompt[0].span_bytes, c.step.span_bytes) for c in contents]
        streamed = max(sum(span[phase] > 0 for span in spans) for phase in (0, 1))
        slots = min(prefetch_step, streamed)
        ring = slots * max(map(max, spans))
        return Weighed(
            saved_bytes=sum(c.unit_bytes for c in contents) - ring,
            host_bytes=sum(c.slab_bytes for c in contents),
            num_slots=slots,
            num_streamed=streamed,
        )

    def objective_ps(self, contents: Sequence[Content], num_slots: int, setting: int) -> Fraction:
        """Weighted time of a request, exactly as its schedule would be priced."""
        chosen, problem = self.problem.settings[setting], self.problem
        prompt = [c.prompt[setting] for c in contents]
        step = [c.step for c in contents]
        if num_slots and not any(each.span_bytes for each in step):
            users = [layer for layer, each in enumerate(prompt) if each.span_bytes]
            for layer in users[-num_slots:]:
                step[layer] = step[layer]._replace(uva_ps=contents[layer].kept_uva_ps)
        rows = chosen.row_ps
        prompt = _compute(prompt, chosen.prefill.layer_ps, rows[0])
        step = _compute(step, problem.decode.layer_ps, rows[1])
        prefill = prefill_ps(prompt, step, num_slots, chosen.prefill.outside_ps)
        decode = decode_ps(step, num_slots, problem.decode.outside_ps)
        return problem.weights[0] * prefill + problem.weights[1] * decode

    def _price(self, kind: int, parts: tuple[Part, ...]) -> Content:
        chosen: list[tuple[Unit, Part]] = []
        for unit in self.problem.units_of_kind[kind]:
            part = next((p for p in parts if p.segment_class.takes(unit)), None)
            if part is not None:
                chosen.append((unit, part))
        if not chosen:
            nothing = LayerPass(0, 0, 0, 0)
            return Content(0, 0, (nothing,) * len(self.problem.settings), nothing, 0)
        slab = build_slab((unit, _RULES[part.prefill, part.decode]) for unit, part in chosen)
        spans = {phase: slab.span(phase) for phase in Phase}

        def layer_pass(phase: Phase, uva_ps: int) -> LayerPass:
            span = spans[phase]
            size = 0 if span is None else span.nbytes
            copy_ps = to_ps(self.problem.machine.copy_seconds(size)) if size else 0
            return LayerPass(0, uva_ps, size, copy_ps)

        in_prefill = [unit for unit, part in chosen if part.prefill is Backend.UVA]
        in_decode = [unit for unit, part in chosen if part.decode is Backend.UVA]
        never = [unit for unit, part in chosen if part.prefill is part.decode is Backend.UVA]
        read = self.problem.read_in_place
        return Content(
            unit_bytes=sum(unit.nbytes for unit, _ in chosen),
            slab_bytes=slab.nbytes,
            prompt=tuple(
                layer_pass(Phase.PREFILL, read(in_prefill, setting.chunk_tokens)[0])
                for setting in self.problem.settings
            ),
            step=layer_pass(Phase.DECODE, self.problem.read_step_in_place(in_decode)[0]),
            kept_uva_ps=self.problem.read_step_in_place(never)[0],
        )


def _compute(passes: Sequence[LayerPass], layer_ps: Sequence[int], row_ps: int) -> list[LayerPass]:
    """Fill in the layers' own compute, and the embedding's rows with the first layer's reading."""
    filled = [
        LayerPass(compute, each.uva_ps, each.span_bytes, each.copy_ps)
        for each, compute in zip(passes, layer_ps, strict=True)
    ]
    filled[0] = filled[0]._replace(uva_ps=filled[0].uva_ps + row_ps)
    return filled


_RULES = {
    (prefill, decode): Rule(group_size=1, num_in_group=1, prefill=prefill, decode=decode)
    for prefill in Backend
    for decode in Backend
}
