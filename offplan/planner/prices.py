"""Exact memory and times of candidates, many at once."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.costs.steady import PassTable, price_passes
from offplan.held.unit import Unit
from offplan.placement import Phase, build_slab, off_gpu_bytes
from offplan.planner.aims import Floats
from offplan.planner.candidates import NO_RULE, Candidates, Ints
from offplan.planner.classes import list_patterns
from offplan.planner.numbers import Numbers, Own
from offplan.planner.option import Option
from offplan.planner.space import Space

MOST = 2**30
"""More units than a layer has."""


class Content(NamedTuple):
    """The offloaded content of one layer, and its costs; an array of each for many layers."""

    unit_bytes: Any = 0
    """Bytes off the GPU."""
    slab_bytes: Any = 0
    """Bytes on the host, padding included; on engines those that are page-locked at least."""
    prompt_bytes: Any = 0
    """Bytes that stream through the ring in prefill."""
    step_bytes: Any = 0
    """Bytes that stream through the ring in decode."""
    prompt_copy_ps: Any = 0
    step_copy_ps: Any = 0
    step_read_ps: Any = 0
    """Picoseconds that a decode step reads in place."""
    kept_read_ps: Any = 0
    """Picoseconds of that reading if the ring keeps what prefill streamed."""
    step_cores_ps: Any = 0
    """Picoseconds that a decode step waits for the host's cores."""
    beside_cores_ps: Any = 0
    """``step_cores_ps`` in a step that copies, too."""
    kept_cores_ps: Any = 0
    """Picoseconds of that wait if the ring keeps what prefill streamed."""
    prompt_read_ps: Any = 0
    """Picoseconds that prompts read in place, [settings]."""


@dataclass
class Prices:
    """Weighs and prices candidates of one space; remembers what a layer's content costs."""

    space: Space
    options: tuple[Option, ...]
    """What a rule may take and how, in their order."""
    _contents: list[Content] = field(default_factory=list)
    _numbers: dict[tuple[int, tuple[int, ...], int], int] = field(default_factory=dict)
    _tables: dict[tuple[int, int], Ints] = field(default_factory=dict)
    _arrays: Content | None = None

    @cached_property
    def numbers(self) -> Numbers:
        """Costs of rules' own numbers."""
        return Numbers(self.space, self.options)

    @cached_property
    def padding_bytes(self) -> Ints:
        """Bytes of padding that stays on the GPU under rules of each option, [options]."""
        takes = [self.space.takes_padding(option.segment_class) for option in self.options]
        return self.space.stage.layout.padding_bytes * ~np.array(takes, dtype=bool)

    @property
    def contents(self) -> Content:
        """All contents so far, a row each."""
        if self._arrays is None or len(self._arrays.unit_bytes) < len(self._contents):
            columns = zip(*self._contents, strict=True)
            self._arrays = Content(*(np.array(each, dtype=np.int64) for each in columns))
        return self._arrays

    def number(self, kind: int, options: tuple[int, ...], most: int = MOST) -> int:
        """Number the content of a layer of a kind, of which rules of these options take a part.

        They take the ``most`` first units at most.
        """
        key = kind, options, most
        if key not in self._numbers:
            space = self.space
            chosen = {
                id(unit): self.options[option]
                for option in options
                for unit in space.taken(self.options[option].segment_class)[kind][:most]
            }
            units = (unit for unit in space.units[kind] if id(unit) in chosen)
            self._numbers[key] = len(self._contents)
            self._contents.append(self._price([(unit, chosen[id(unit)]) for unit in units]))
        return self._numbers[key]

    def _price(self, chosen: list[tuple[Unit, Option]]) -> Content:
        space, at_use, layout = self.space, self.space.at_use, self.space.stage.layout
        if not chosen:
            return Content(prompt_read_ps=[0] * len(space.settings))
        slab = build_slab((unit, way.every_layer) for unit, way in chosen)
        spans = [slab.span(phase) for phase in Phase]
        sizes = [0 if span is None else span.nbytes for span in spans]
        copies = [space.copying_ps(size) if size else 0 for size in sizes]
        engine = space.stage.pass_rules
        if engine is not None and copies[1]:
            copies[1] = engine.step_copy_ps(copies[1])
        in_prefill = [(u, way.prefill) for u, way in chosen if not way.prefill.streams]
        # what has a cost curve is priced by its cache's size
        reads = [(u, way) for u, way in chosen if not (way.has_curve or way.decode.streams)]
        in_decode = [(u, way.decode) for u, way in reads]
        never = [(u, way.decode) for u, way in reads if not way.fills_ring]
        of_chunk = {
            chunk: at_use.read_ps(in_prefill, prompt) for chunk, prompt in space.prompts.items()
        }
        prompt_reads = [of_chunk[each.prefill_chunk] for each in space.settings]
        step_read_ps = space.step_read_ps(in_decode)
        step_cores_ps, beside_cores_ps = space.step_cores_ps(in_decode)
        kept_read_ps, kept_cores_ps = step_read_ps, step_cores_ps
        if len(never) < len(in_decode):
            kept_read_ps, kept_cores_ps = space.step_read_ps(never), space.step_cores_ps(never)[0]
        if engine is not None and engine.copies_in_place and not any(spans):
            # it copies what it is told to read in place, for each chunk
            step_read_ps = space.copying_ps(slab.nbytes)
            prompt_reads = [int(count) * step_read_ps for count in space.table.num_chunks]
        return Content(
            unit_bytes=sum(
                off_gpu_bytes(layout.gpu_bytes(unit), way.prefill, way.decode)
                for unit, way in chosen
            ),
            slab_bytes=layout.host_bytes((unit for unit, _ in chosen), slab.nbytes),
            prompt_bytes=sizes[0],
            step_bytes=sizes[1],
            prompt_copy_ps=copies[0],
            step_copy_ps=copies[1],
            step_read_ps=step_read_ps,
            kept_read_ps=kept_read_ps,
            step_cores_ps=step_cores_ps,
            beside_cores_ps=beside_cores_ps,
            kept_cores_ps=kept_cores_ps,
            prompt_read_ps=prompt_reads,
        )

    def _table(self, first: int, second: int) -> Ints:
        """Numbers of contents, [kinds, 4]: by whether the first and the second rule take it."""
        if (first, second) not in self._tables:
            of_first, of_second = ((each,) if each != NO_RULE else () for each in (first, second))
            ways = ((), of_first, of_second, (*of_first, *of_second))
            kinds = range(len(self.space.units))
            numbers = [[self.number(kind, way) for way in ways] for kind in kinds]
            self._tables[first, second] = np.array(numbers)
        return self._tables[first, second]

    def number_all(self, candidates: Candidates) -> Ints:
        """Number the contents of all layers, [candidates, layers]."""
        pairs = np.column_stack([candidates.first, candidates.second])
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        tables = np.stack([self._table(int(first), int(second)) for first, second in distinct])
        takes = self._takes(candidates)
        numbers: Ints = tables[which.reshape(-1, 1), self.space.kinds, takes[0] + 2 * takes[1]]
        return numbers

    def _takes(self, candidates: Candidates) -> tuple[Ints, Ints]:
        """1 for each layer that the first rule takes, and the second one, [candidates, layers]."""
        return self._layers[candidates.first_pattern], self._layers[candidates.second_pattern]

    @cached_property
    def _layers(self) -> Ints:
        """True if a pattern selects a layer; the last row, at NO_RULE, selects none."""
        layers = list_patterns(len(self.space.kind_of)).layers.astype(np.int64)
        return np.vstack([layers, np.zeros_like(layers[:1])])

    def weigh(self, numbers: Ints, prefetch_step: Ints) -> tuple[Ints, Ints, Ints]:
        """Bytes off the GPU less those of slots, bytes of slabs, and layers that stream.

        Plans are given by the numbers of their layers' contents, [plans, layers].
        """
        contents = self.contents
        spans = contents.prompt_bytes[numbers], contents.step_bytes[numbers]
        num_turns = np.maximum(*((each > 0).sum(axis=1) for each in spans))
        ring = np.minimum(prefetch_step, num_turns) * np.maximum(*spans).max(axis=1)
        off_gpu = contents.unit_bytes[numbers].sum(axis=1) - ring
        return off_gpu, contents.slab_bytes[numbers].sum(axis=1), num_turns

    def spend(self, candidates: Candidates, spare: Ints) -> tuple[NDArray[np.bool_], Own | None]:
        """Spend the bytes that candidates leave on what their rules' own numbers take.

        Returns whether the bytes do, [candidates]; None if no option has such numbers.
        """
        options = candidates.first, candidates.second
        return self.numbers.spend(candidates.setting, options, self._takes(candidates), spare)

    def price(
        self, numbers: Ints, setting: Ints, prefetch_step: Ints, own: Own | None = None
    ) -> tuple[Floats, Floats]:
        """Price both phases as the plans' schedules would be, on an engine or not.

        Plans are given by the numbers of their layers' contents, [plans, layers]. Returns the
        picoseconds of each one's prompt and decode step, rounded to floats at the end.
        """
        space, contents = self.space, self.contents
        table, row_ps = space.table, space.table.row_ps[setting]
        prompt = PassTable(
            compute_ps=table.layer_ps[setting],
            read_ps=space.calls[0] * contents.prompt_read_ps[numbers, setting[:, None]],
            span_bytes=contents.prompt_bytes[numbers],
            copy_ps=space.calls[0] * contents.prompt_copy_ps[numbers],
            outside_ps=table.outside_ps[setting],
            prefetch_step=prefetch_step,
        )
        prompt.read_ps[:, 0] += row_ps[:, 0]  # rows are read just before the first layer
        streamed = contents.step_bytes[numbers]
        copies = streamed.any(axis=1, keepdims=True)
        keeps = prompt.is_last & ~copies
        by_cores = np.where(keeps, contents.kept_cores_ps[numbers], contents.step_cores_ps[numbers])
        by_cores = np.where(copies, contents.beside_cores_ps[numbers], by_cores)
        step = PassTable(
            compute_ps=np.array(space.decode.layer_ps) + by_cores,
            read_ps=space.calls[1]
            * np.where(keeps, contents.kept_read_ps[numbers], contents.step_read_ps[numbers]),
            span_bytes=streamed,
            copy_ps=space.calls[1] * contents.step_copy_ps[numbers],
            outside_ps=np.full(len(numbers), space.decode.behind_ps),
            prefetch_step=prefetch_step,
        )
        step.read_ps[:, 0] += row_ps[:, 1]
        if own is not None:
            prompt, step = self.numbers.add(prompt, step, setting, own)
        given = prompt, step, space.slowdown, table.num_chunks[setting]
        prompts, steps, under = price_passes(space.stage.pass_rules, *given)
        return prompts.astype(float), steps / under
