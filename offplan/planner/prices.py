"""Exact memory and times of candidates, many at once."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.costs.parts import span_seconds
from offplan.costs.steady import (
    PartTable,
    PassTable,
    engine_prompt_ps,
    engine_step_ps,
    prompt_ps,
    step_ps,
)
from offplan.costs.timeline import to_ps
from offplan.held.unit import Unit
from offplan.placement import PART_SLOTS, Phase, build_slab, off_gpu_bytes
from offplan.planner.aims import Floats
from offplan.planner.ladders import Ladders
from offplan.planner.options import Option
from offplan.planner.patterns import list_patterns
from offplan.planner.space import Space

Ints = NDArray[np.int64]


MOST = 2**30
"""More units than a layer has."""
NO_RULE = -1
"""Stands for a rule that a candidate does not have, and for its pattern."""


class Candidates(NamedTuple):
    """Plans of up to two rules: arrays of one number for each candidate."""

    setting: Ints
    prefetch_step: Ints
    first: Ints
    """The option of the first rule, by number."""
    first_pattern: Ints
    second: Ints
    second_pattern: Ints


class Rungs(NamedTuple):
    """The rungs that candidates have memory for."""

    option: Ints
    """The option whose ladders they are of; NO_RULE where none has any, [candidates]."""
    of_layer: Ints
    """Rungs of each layer, [candidates, layers]."""


class Content(NamedTuple):
    """What is offloaded of one layer, and what that costs; an array of each for many layers."""

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
    """What a decode step reads in place."""
    kept_read_ps: Any = 0
    """What of that remains when the ring keeps what prefill streamed."""
    step_cores_ps: Any = 0
    """What a decode step waits for the host's cores."""
    beside_cores_ps: Any = 0
    """The same in a step that copies, too."""
    kept_cores_ps: Any = 0
    """What of it remains when the ring keeps what prefill streamed."""
    num_parts: Any = 0
    """Parts in which prompts stream its experts."""
    part_bytes: Any = 0
    """Bytes of a slot that holds one."""
    part_copy_ps: Any = 0
    tokens_at_once: Any = 0
    """Tokens of each sequence that meet a part at once; 0 where all do."""


@dataclass
class Prices:
    """Weighs and prices candidates of one space; remembers what a layer's content costs."""

    space: Space
    _contents: list[Content] = field(default_factory=list)
    _prompt_reads: list[list[int]] = field(default_factory=list)
    _numbers: dict[tuple[int, tuple[int, ...], int], int] = field(default_factory=dict)
    _tables: dict[tuple[int, int], Ints] = field(default_factory=dict)
    _arrays: tuple[Content, Ints] = (Content(), np.zeros(0, dtype=np.int64))

    @property
    def contents(self) -> tuple[Content, Ints]:
        """All contents so far, a row each, and what prompts take to read of them in place.

        The latter are picoseconds, [contents, settings].
        """
        if len(self._arrays[1]) < len(self._contents):
            columns = np.array(self._contents, dtype=np.int64).T
            self._arrays = Content(*columns), np.array(self._prompt_reads, dtype=np.int64)
        return self._arrays

    def number(self, kind: int, options: tuple[int, ...], most: int = MOST) -> int:
        """Number the content of a layer of a kind, of which rules of these options take a part.

        They take the ``most`` first units at most.
        """
        key = kind, options, most
        if key not in self._numbers:
            space = self.space
            chosen = {
                id(unit): space.options[option]
                for option in options
                for unit in space.taken(space.options[option].segment_class)[kind][:most]
            }
            units = (unit for unit in space.units[kind] if id(unit) in chosen)
            content, reads = self._price([(unit, chosen[id(unit)]) for unit in units])
            self._numbers[key] = len(self._contents)
            self._contents.append(content)
            self._prompt_reads.append(reads)
        return self._numbers[key]

    def _price(self, chosen: list[tuple[Unit, Option]]) -> tuple[Content, list[int]]:
        space, layout = self.space, self.space.stage.layout
        if not chosen:
            return Content(), [0] * len(space.settings)
        rules = {way: way.rule(1, 1) for _, way in chosen}
        slab = build_slab((unit, rules[way]) for unit, way in chosen)
        spans = [slab.span(phase) for phase in Phase]
        sizes = [0 if span is None else span.nbytes for span in spans]
        copies = [space.copying_ps(size) if size else 0 for size in sizes]
        in_prefill = [(u, way.prefill) for u, way in chosen if not way.prefill.streams]
        # what climbs a ladder is priced by its rungs
        reads = [(u, way) for u, way in chosen if not (way.climbs or way.decode.streams)]
        in_decode = [(u, way.decode) for u, way in reads]
        never = [(u, way.decode) for u, way in reads if not way.prefill.streams or rules[way].parts]
        by_cores = [[u for u, way in each if way.is_by_cores] for each in (in_decode, never)]
        prompt_reads, step_read_ps = space.prompt_reads(in_prefill), space.step_reads(in_decode)
        engine = space.stage.runner.pass_rules
        if engine is not None and engine.copies_in_place and not any(spans):
            # it copies what it is told to read in place, for each chunk
            step_read_ps = space.copying_ps(slab.nbytes)
            prompt_reads = [int(count) * step_read_ps for count in space.table.num_chunks]
        content = Content(
            unit_bytes=sum(
                off_gpu_bytes(layout.gpu_bytes(unit.tensors), way.prefill, way.decode)
                for unit, way in chosen
            ),
            slab_bytes=layout.host_bytes(
                (tensor for unit, _ in chosen for tensor in unit.tensors), slab.nbytes
            ),
            prompt_bytes=sizes[0],
            step_bytes=sizes[1],
            prompt_copy_ps=copies[0],
            step_copy_ps=copies[1],
            step_read_ps=step_read_ps,
            kept_read_ps=space.step_reads(never),
            step_cores_ps=space.cores_ps(by_cores[0]),
            beside_cores_ps=space.cores_ps(by_cores[0], beside=True),
            kept_cores_ps=space.cores_ps(by_cores[1]),
        )
        for part in slab.parts[:1]:
            content = content._replace(
                num_parts=len(slab.parts),
                part_bytes=part.slot_bytes,
                part_copy_ps=to_ps(span_seconds(space.machine, part)),
                tokens_at_once=max(rule.tokens_at_once or 0 for rule in rules.values()),
            )
        return content, prompt_reads

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
        takes = [self._layers[p] for p in (candidates.first_pattern, candidates.second_pattern)]
        numbers: Ints = tables[which.reshape(-1, 1), self._kind_of, takes[0] + 2 * takes[1]]
        return numbers

    @cached_property
    def _layers(self) -> Ints:
        """Whether each pattern selects each layer; the last row, at NO_RULE, selects none."""
        layers = list_patterns(len(self.space.kind_of)).layers.astype(np.int64)
        return np.vstack([layers, np.zeros_like(layers[:1])])

    @cached_property
    def _kind_of(self) -> Ints:
        return np.array(self.space.kind_of)

    def weigh(self, numbers: Ints, prefetch_step: Ints, setting: Ints) -> tuple[Ints, Ints, Ints]:
        """Bytes off the GPU less those of slots, bytes of slabs, and layers that stream.

        Less also what chunks keep at experts in parts, where a plan has any.

        Plans are given by the numbers of their layers' contents, [plans, layers].
        """
        contents, _ = self.contents
        spans = contents.prompt_bytes[numbers], contents.step_bytes[numbers]
        num_turns = np.maximum(*((each > 0).sum(axis=1) for each in spans))
        ring = np.minimum(prefetch_step, num_turns) * np.maximum(*spans).max(axis=1)
        part_bytes = contents.part_bytes[numbers]
        if part_bytes.any():
            at_once = contents.tokens_at_once[numbers]
            _, waiting = self.space.find_groups(setting[:, None], at_once)
            ring += PART_SLOTS * part_bytes.max(axis=1)
            ring += np.where(part_bytes > 0, waiting, 0).max(axis=1)
        off_gpu = contents.unit_bytes[numbers].sum(axis=1) - ring
        return off_gpu, contents.slab_bytes[numbers].sum(axis=1), num_turns

    @cached_property
    def ladders(self) -> Ladders:
        """What rungs take and cost."""
        return Ladders(self.space)

    def climb(self, candidates: Candidates, spare: Ints) -> tuple[NDArray[np.bool_], Rungs | None]:
        """Spend the bytes that candidates leave on rungs.

        Returns whether each has as many as it needs, [candidates], and the rungs of each layer;
        None where no option has any.
        """
        ladders = self.ladders
        if not ladders.climbs.any():
            return np.ones(len(spare), dtype=bool), None
        both = ladders.climbs[candidates.first], ladders.climbs[candidates.second]
        option = np.select(both, (candidates.first, candidates.second), NO_RULE)
        patterns = candidates.first_pattern, candidates.second_pattern
        takes = self._layers[np.select(both, patterns, NO_RULE)]
        rungs = ladders.climb(option, takes, spare)
        return rungs.any(axis=1) | (option == NO_RULE), Rungs(option, rungs)

    def price(
        self, numbers: Ints, setting: Ints, prefetch_step: Ints, rungs: Rungs | None = None
    ) -> tuple[Floats, Floats]:
        """Price both phases as the plans' schedules would be, on an engine or not.

        Plans are given by the numbers of their layers' contents, [plans, layers]. Returns the
        picoseconds of each one's prompt and decode step, rounded to floats at the end.
        """
        space = self.space
        contents, prompt_reads = self.contents
        table, row_ps = space.table, space.table.row_ps[setting]
        prompt = PassTable(
            compute_ps=table.layer_ps[setting],
            read_ps=space.calls[0] * prompt_reads[numbers, setting[:, None]],
            span_bytes=contents.prompt_bytes[numbers],
            copy_ps=space.calls[0] * contents.prompt_copy_ps[numbers],
            outside_ps=table.outside_ps[setting],
            prefetch_step=prefetch_step,
        )
        num_parts = contents.num_parts[numbers]
        if num_parts.any():
            routed_ps = np.where(num_parts > 0, table.routed_ps[setting], 0)
            groups, _ = space.find_groups(setting[:, None], contents.tokens_at_once[numbers])
            groups = np.where(num_parts > 0, groups, 1)
            part_ps = -(-routed_ps // (groups * np.maximum(1, num_parts)))
            part_ps += -(-table.launching_ps[setting][:, None] // groups)
            parts = PartTable(num_parts, part_ps, contents.part_copy_ps[numbers], groups)
            prompt = replace(prompt, compute_ps=prompt.compute_ps - routed_ps, parts=parts)
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
            outside_ps=np.full(len(numbers), space.decode.outside_ps),
            prefetch_step=prefetch_step,
        )
        step.read_ps[:, 0] += row_ps[:, 1]
        if rungs is not None:
            at = rungs.option[:, None], self._kind_of, rungs.of_layer
            more = [each[at] for each in self.ladders.times_ps]
            waiting = np.where(copies, more[4], more[3])
            prompt.read_ps[:], step.read_ps[:] = prompt.read_ps + more[0], step.read_ps + more[2]
            prompt = replace(prompt, compute_ps=prompt.compute_ps + more[1])
            step = replace(step, compute_ps=step.compute_ps + waiting)
        if (engine := space.stage.runner.pass_rules) is not None:
            prompts_ps = engine_prompt_ps(engine, prompt, table.num_chunks[setting])
            return prompts_ps.astype(float), engine_step_ps(engine, step).astype(float)
        over, under = step_ps(step, space.slowdown)
        return prompt_ps(prompt, step, space.slowdown).astype(float), over / under
