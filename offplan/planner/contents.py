"""What rules take of a layer, priced once for all candidates that take the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from offplan.costs.link import uva_slowdown
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
    prompt_bytes: int
    """That stream through the ring in prefill, and then in decode."""
    step_bytes: int
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
    """No more than there are layers that stream, in the phase where most do."""


@dataclass
class Pricer:
    """Weighs and prices candidates of one problem; remembers what layers of a kind cost."""

    problem: Problem
    _tables: dict[tuple[Part, ...], "_Table"] = field(default_factory=dict)

    def contents(self, choices: Sequence[Choice]) -> list[Content]:
        """What the rules take of each layer; the first that matches a parameter wins."""
        parts = tuple(Part(*choice[:3]) for choice in choices)
        table = self._tables.get(parts)
        if table is None:
            table = self._tables[parts] = _Table(self.problem, parts)
        rows = (_as_row(choice.pattern.layers, len(table.kind_of)) for choice in choices)
        return [table[taken] for taken in zip(table.kind_of, *rows, strict=True)]

    def weigh(self, contents: Sequence[Content], prefetch_step: int) -> Weighed:
        """Add up memory."""
        units, slabs, *spans = zip(*(content[:4] for content in contents), strict=True)
        slots = min(prefetch_step, max(len(contents) - each.count(0) for each in spans))
        ring = slots * max(map(max, spans))
        return Weighed(sum(units) - ring, sum(slabs), slots)

    def prefill_ps(self, contents: Sequence[Content], num_slots: int, setting: int) -> int:
        """Time of the prompt, exactly as its schedule would be priced."""
        chosen = self.problem.settings[setting]
        prompt = _read_rows([c.prompt[setting] for c in contents], chosen.row_ps[0])
        step = [c.step for c in contents]
        return prefill_ps(prompt, step, num_slots, chosen.prefill.outside_ps, self._slowdown)

    def decode_ps(self, contents: Sequence[Content], num_slots: int, setting: int) -> Fraction:
        """Time of a decode step, exactly as its schedule would be priced."""
        step = [c.step for c in contents]
        if num_slots and not any(each.span_bytes for each in step):
            users = [layer for layer, c in enumerate(contents) if c.prompt_bytes]
            for layer in users[-num_slots:]:
                step[layer] = step[layer]._replace(uva_ps=contents[layer].kept_uva_ps)
        step = _read_rows(step, self.problem.settings[setting].row_ps[1])
        return decode_ps(step, num_slots, self.problem.decode.outside_ps, self._slowdown)

    @cached_property
    def _slowdown(self) -> float:
        return uva_slowdown(self.problem.machine)


class _Table(dict[tuple[int, ...], Content]):
    """What some parts take of a layer, by its kind and whether each part's pattern selects it."""

    def __init__(self, problem: Problem, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.problem, self.parts = problem, parts
        self.kind_of = problem.kind_of

    def __missing__(self, taken: tuple[int, ...]) -> Content:
        kind, *selected = taken
        parts = [part for part, takes in zip(self.parts, selected, strict=True) if takes]
        content = self[taken] = _price(self.problem, kind, parts)
        return content


@cache
def _as_row(layers: int, num_layers: int) -> tuple[int, ...]:
    """Bits as a tuple, by layer."""
    return tuple(layers >> layer & 1 for layer in range(num_layers))


def _read_rows(passes: list[LayerPass], row_ps: int) -> list[LayerPass]:
    """Add the embedding's rows to the first layer's reading."""
    passes[0] = passes[0]._replace(uva_ps=passes[0].uva_ps + row_ps)
    return passes


def _price(problem: Problem, kind: int, parts: Sequence[Part]) -> Content:
    layer = problem.kind_of.index(kind)
    step_ps = problem.decode.layer_ps[layer]
    prompt_ps = [setting.prefill.layer_ps[layer] for setting in problem.settings]
    chosen: list[tuple[Unit, Part]] = []
    for unit in problem.units_of_kind[kind]:
        part = next((p for p in parts if p.segment_class.takes(unit)), None)
        if part is not None:
            chosen.append((unit, part))
    if not chosen:
        prompt = tuple(LayerPass(each_ps, 0, 0, 0) for each_ps in prompt_ps)
        return Content(0, 0, 0, 0, prompt, LayerPass(step_ps, 0, 0, 0), 0)
    slab = build_slab((unit, _RULES[part.prefill, part.decode]) for unit, part in chosen)
    spans = (slab.span(Phase.PREFILL), slab.span(Phase.DECODE))
    sizes = [0 if span is None else span.nbytes for span in spans]
    copies = [to_ps(problem.machine.copy_seconds(size)) if size else 0 for size in sizes]
    in_prefill = [unit for unit, part in chosen if part.prefill is Backend.UVA]
    in_decode = [unit for unit, part in chosen if part.decode is Backend.UVA]
    never = [unit for unit, part in chosen if part.prefill is part.decode is Backend.UVA]
    reads = (problem.read_in_place(in_prefill, each.chunk_tokens) for each in problem.settings)
    return Content(
        unit_bytes=sum(unit.nbytes for unit, _ in chosen),
        slab_bytes=slab.nbytes,
        prompt_bytes=sizes[0],
        step_bytes=sizes[1],
        prompt=tuple(
            LayerPass(each_ps, read_ps, sizes[0], copies[0])
            for each_ps, (read_ps, _) in zip(prompt_ps, reads, strict=True)
        ),
        step=LayerPass(step_ps, problem.read_step_in_place(in_decode)[0], sizes[1], copies[1]),
        kept_uva_ps=problem.read_step_in_place(never)[0],
    )


_RULES = {
    (prefill, decode): Rule(group_size=1, num_in_group=1, prefill=prefill, decode=decode)
    for prefill in Backend
    for decode in Backend
}
